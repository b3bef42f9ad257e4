"""Forward and backward recorded once as a CUDA graph and replayed, and the one synchronisation of a step."""

import torch


class Recorded:
    """`function(*inputs)`, recorded once as a CUDA graph and replayed: the device never waits for Python to launch its kernels.

    function: takes tensors of fixed shapes on the device and returns one tensor; what it reads and writes beside (parameters, gradients)
    must stay where it is, and whatever Python decides in it stays as it was when it was recorded: `holds` tells whether it still would.
    """

    def __init__(self, function, *inputs):
        self.function = function
        self.inputs = [x.clone() for x in inputs]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has memory of its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads may go on working
            self.output = function(*self.inputs)

    def __call__(self, *inputs):
        """Valid until the next call."""
        for mine, x in zip(self.inputs, inputs):
            mine.copy_(x)
        self.graph.replay()
        return self.output

    def holds(self, *inputs):
        """Whether the function still computes what was recorded; where two replays differ (dropout), within ten times that.

        The last thing to ask: the graph and its memory are given up first, for there may be none for the function beside it.
        """
        first, second = self(*inputs).clone(), self(*inputs).clone()
        torch.cuda.synchronize()
        self.graph.reset()
        torch.cuda.empty_cache()
        now = self.function(*inputs)
        allowed = 1e-3 * now.abs() + 10 * (first - second).abs()
        return bool(((first - now).abs() <= allowed).all())


def record(function, *inputs):
    """`Recorded(function, *inputs)`, or None where that can't be had, which is said."""
    try:
        return Recorded(function, *inputs)
    except Exception as e:  # anything that a graph can't hold, such as a value that Python reads back
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        random.graphsafe_set_state(random.clone_state())  # a recording that fails leaves it waiting for its end
        print(f"No CUDA graph, Python launches every kernel: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
        return None


def recorded_calls(model):
    """`model` for the evaluation: its forward pass, of tokens alone and of tokens with targets, each recorded after its first batch."""
    recorded = {}

    def call(*tensors, **how):
        if len(tensors) not in recorded:
            first = model(*tensors, **how)  # compiles and tunes
            recorded[len(tensors)] = record(lambda *tensors: model(*tensors, **how), *tensors)
            return first
        replay = recorded[len(tensors)]
        return replay(*tensors) if replay else model(*tensors, **how)

    call._orig_mod = model  # as torch.compile names it: what checks of the model itself look at
    return call


def wait_for(value):
    """The number in a 0-D tensor, and all work of the device before it done: one synchronisation."""
    if value.is_cuda:
        on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        torch.cuda.synchronize(value.device)
        value = on_host
    return value.item()
