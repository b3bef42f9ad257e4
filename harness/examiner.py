"""The evaluation's two sides. The examiner holds the validation text, its bytes and the sum; the model answers tokens with logits.

Inputs go in and logits come out, through memory that both sides see: the GPU's own where it can be shared (CUDA IPC), the host's on AMD
and elsewhere. Each message is JSON, read as data. The examiner is the process that has started train.py (harness/launch.py); the model's
side runs in train.py, which can't read what it is asked about.
"""

import json
import math
import mmap
import os
import random
import socket
import sys

import torch
import torch.nn.functional as F

from harness.data import dataset as chosen
from harness.data import metric, ready
from harness.data.dataset import DataError, NoResult
from harness.data.loader import make_dataloader
from harness.data.tokenizer import Tokenizer

CHANNEL = "AUTORESEARCH_EXAMINER"  # the environment variable with the descriptor of the model's end of the channel
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
ROOM = 2**30  # bytes of float32 logits at a time, of which both sides hold a few: a training's micro-batch may be many times that
MOST_BYTES = 2**36  # of logits at a time that are not refused
LONGEST = 2**16  # bytes of a message
PLACES = 16  # at least so many are looked at for what sees later tokens
DRAWN = 8  # at most so many batches are asked again with other tokens


class Gone(Exception):
    """The other side has ended."""


def send(channel, descriptors=(), **message):
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def receive(channel):
    """(message, descriptors) of the other side."""
    content, descriptors, _, _ = socket.recv_fds(channel, LONGEST, 2)
    if not content:
        raise Gone
    message = json.loads(content)
    if not isinstance(message, dict):
        raise ValueError(f"a message that is none: {content[:80]!r}")
    return message, descriptors


# ---- memory that both sides see ----------------------------------------------------------------------------------------------------------


def shared(shapes, on_gpu):
    """Tensors of (shape, dtype) each, a description of them for `opened`, and the descriptors that go with it."""
    if on_gpu:
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
        handles = [[x.hex() if isinstance(x, bytes) else x for x in t.untyped_storage()._share_cuda_()] for t in tensors]
        return tensors, handles, []
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    descriptor = os.memfd_create("logits")
    os.ftruncate(descriptor, sum(sizes))
    return _mapped(descriptor, shapes), None, [descriptor]


def opened(handles, descriptors, shapes):
    """The same tensors, on the other side."""
    if handles is None:
        return _mapped(descriptors[0], shapes)
    tensors = []
    for (shape, dtype), handle in zip(shapes, handles):
        storage = torch.UntypedStorage._new_shared_cuda(*(bytes.fromhex(x) if isinstance(x, str) else x for x in handle))
        tensors.append(torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape))
    return tensors


def _mapped(descriptor, shapes):
    memory, offset, tensors = mmap.mmap(descriptor, 0), 0, []
    for shape, dtype in shapes:
        count = math.prod(shape)
        tensors.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape))
        offset += count * dtype.itemsize
    return tensors


def _shapes(rows, T, width, dtype):
    """Two inputs and two answers: one is worked on while the other is read."""
    return [((rows, T), torch.int64)] * 2 + [((rows, T, width), dtype)] * 2


def _wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- the model's side --------------------------------------------------------------------------------------------------------------------


def channel():
    """The way to the examiner of this run; None where train.py was started without one."""
    text = os.environ.get(CHANNEL, "")
    return socket.socket(fileno=os.dup(int(text))) if text.isdecimal() else None


def save(content):
    """torch.save into the file that the launcher has opened for that; returns its path. OSError where it can't be written."""
    descriptor = os.environ.get("AUTORESEARCH_MODEL")
    if descriptor is None:
        raise OSError("the launcher could not open a file for it")
    with open(os.dup(int(descriptor)), "wb") as f:
        torch.save(content, f)
    way = channel()
    send(way, want="save")
    message, _ = receive(way)
    if "saved" not in message:
        raise OSError(message.get("invalid"))
    return message["saved"]


def answer(model, rows):
    """Answer the examiner with the logits of `model(x)`, x (rows, tokens) int64, until it says what came of it: returns val_bpb.

    NoResult where it says that there is none.
    """
    sys.stdout.flush()  # what the examiner prints comes after it
    rows = max(1, min(rows, ROOM // (4 * chosen.DATASET.max_seq_len * chosen.DATASET.vocab_size)))
    way, device = channel(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = model(torch.zeros((rows, chosen.DATASET.max_seq_len), dtype=torch.int64, device=device))
    if logits.ndim != 3 or logits.shape[:2] != (rows, chosen.DATASET.max_seq_len):
        raise NoResult(f"invalid: model(x) returned {tuple(logits.shape)}, not the logits (rows, tokens, vocabulary)")
    width, dtype = logits.size(-1), logits.dtype
    send(way, want="examination", rows=rows, width=width, dtype=str(dtype).removeprefix("torch."), gpu=device.type == "cuda")
    memory = None
    while True:
        message, descriptors = receive(way)
        if "memory" in message:
            try:
                memory = opened(message["memory"], descriptors, _shapes(rows, chosen.DATASET.max_seq_len, width, dtype))
                send(way, opened=True)
            except Exception as e:  # the driver can't, which only this tells
                send(way, opened=False, why=f"{type(e).__name__}: {e}"[:200])
        elif "x" in message:
            turn = message["x"]
            memory[2 + turn].copy_(model(memory[turn].to(device)))
            _wait()
            send(way, done=turn)
        elif "val_bpb" in message:
            return message["val_bpb"]
        elif "fault" in message:
            raise DataError(message["fault"])
        else:
            raise NoResult(message["invalid"])


# ---- the examiner's side -----------------------------------------------------------------------------------------------------------------


class Answers:
    """Logits of the model on the other side: `of` a stream of questions, one behind the other, so that neither side waits."""

    def __init__(self, way, rows, width, dtype, on_gpu):
        self.way, self.device = way, torch.device("cuda" if on_gpu else "cpu")
        shapes = _shapes(rows, chosen.DATASET.max_seq_len, width, dtype)
        # On AMD nobody has shown us two processes that share the GPU's memory; there it mostly is the host's anyway.
        for shared_gpu in (True, False) if on_gpu and not torch.version.hip else (False,):
            try:
                self.memory, handles, descriptors = shared(shapes, shared_gpu)
            except RuntimeError as e:
                if not shared_gpu:
                    raise
                why = str(e).splitlines()[0][:200]
            else:
                send(way, descriptors, memory=handles)
                said, _ = receive(way)
                for descriptor in descriptors:
                    os.close(descriptor)
                if said.get("opened") is True:
                    return
                why = str(said.get("why"))
            print(f"Logits go through the host's memory: the GPU's can't be shared ({ascii(why)})", flush=True)
        raise NoResult("the model's process could not open the memory that its logits go through")

    def of(self, questions):
        """(question, logits) for each question, a tuple that begins with x; the logits are valid until the next is asked for."""
        waiting, turn = [], 0
        for question in questions:
            self.memory[turn].copy_(question[0])
            _wait()  # the input is there, and what was read of the last answer in this place was read
            send(self.way, x=turn)
            waiting.append((turn, question))
            turn = 1 - turn
            if len(waiting) == 2:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting):
        turn, question = waiting.pop(0)
        said, _ = receive(self.way)
        if said != {"done": turn}:
            raise NoResult("invalid: the model's process does not answer what it is asked")
        return question, self.memory[2 + turn].to(self.device)


def result(way, want):
    """What came of an examination: val_bpb and what it is of, or why there is no number."""
    try:
        val_bpb = examine(way, want)
        return {"val_bpb": val_bpb, "eval_tokens": chosen.DATASET.eval_tokens, "fingerprint": ready.fingerprint()}
    except NoResult as e:
        return {"invalid": str(e)}
    except (Gone, BrokenPipeError, ConnectionResetError):
        return {"invalid": "invalid: train.py ended before its model was examined"}
    except (DataError, OSError) as e:
        return {"fault": str(e)}
    except torch.OutOfMemoryError as e:
        return {"invalid": f"out of GPU memory for the evaluation's logits beside the model: lower DEVICE_BATCH_SIZE ({str(e)[:120]})"}
    except (ValueError, KeyError, TypeError) as e:
        return {"invalid": f"invalid: the model's process answers something strange ({ascii(str(e))[:120]})"}


@torch.no_grad()
def examine(way, want):
    """val_bpb of the model on the other side. want: its wish for an examination. NoResult where it is no model of text."""
    rows, width, dtype, on_gpu = want.get("rows"), want.get("width"), DTYPES.get(want.get("dtype")), want.get("gpu") is True
    T, eval_tokens = chosen.DATASET.max_seq_len, chosen.DATASET.eval_tokens
    if type(rows) is not int or type(width) is not int or dtype is None or not 0 < rows * T * width * dtype.itemsize <= MOST_BYTES:
        raise NoResult(f"invalid: logits of {rows} rows, width {width}, {want.get('dtype')}: what is that?")
    tokenizer, facts = Tokenizer.from_directory(), ready.checked_dataset(chosen.DATASET)
    if width < tokenizer.get_vocab_size():
        raise NoResult(f"invalid: the logits are {width} wide, and the vocabulary has {tokenizer.get_vocab_size()} tokens")
    print(f"Evaluating {eval_tokens:,} tokens", flush=True)
    answers, loader, total = Answers(way, rows, width, dtype, on_gpu), make_dataloader(tokenizer, rows, T, "val"), metric.Sum(tokenizer)
    batches = -(-eval_tokens // T // rows)
    draw = random.SystemRandom()  # nobody who is examined can know what comes
    looked_at = draw.sample(range(batches), min(batches, DRAWN, -(-PLACES // rows) + 1))
    twice = draw.choice(looked_at)  # what is asked again after all others
    asked, before = {}, {}  # of the batches that are looked at: (x, places), logits

    def questions():
        for batch in range(batches):
            x, y, _ = next(loader)
            yield x, y, batch
            if batch in looked_at:  # the same once more, and in each row behind a drawn place other tokens
                places = torch.tensor([draw.randrange(T - 1) for _ in range(rows)], device=x.device)
                asked[batch] = x, places
                others = torch.randint(tokenizer.get_vocab_size(), x.shape, generator=torch.Generator().manual_seed(draw.getrandbits(62)))
                yield torch.where(torch.arange(T, device=x.device) > places[:, None], others.to(x.device), x), None, batch
        yield asked[twice][0], None, None

    rows_left = eval_tokens // T
    for (_, y, batch), logits in answers.of(questions()):
        if y is not None:
            losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
            total.add(losses.view(y.shape), y, min(rows_left, rows))
            rows_left -= rows
            if batch in looked_at:
                before[batch] = logits.clone()
        elif batch is not None:
            metric.check_causal(before[batch], logits, asked[batch][1])
            if batch != twice:
                del before[batch]
        else:
            metric.check_stateless(before[twice], logits)
    ready.check_validation(chosen.DATASET, facts)  # the number is of these tokens, also now
    return total.bpb()
