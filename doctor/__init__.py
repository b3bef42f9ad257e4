"""The doctor's rooms; doctor.py, beside this folder, is the door. To import them the standard library suffices, on a machine without torch.

words.py      numbers and errors as words
machine.py    what is read of a machine: its files, its commands, its GPUs
canary.py     what torch says of itself: its files, and a process that uses it
check.py      what a check is, and how one is made that may crash or hang; host_checks.py, gpu_checks.py and torch_checks.py have them all
checks.py     the table of them: where each applies, how much it matters, why, and what mends it
diagnosis.py  the checks that apply here, made; what stops a run; what is measured
screen.py     what they found as one screen
probe.py      a program: what this machine can do
ten_steps.py  a program: ten training steps (it needs torch)
report.py     all of it as one document for an issue
"""
