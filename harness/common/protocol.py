"""What the run and the loop that judges it agree on."""

EXIT_ENVIRONMENT = 3  # exit code where the machine or the data is at fault, not the experiment
WARMUP_STEPS = 11  # steps before the clock starts: they compile
