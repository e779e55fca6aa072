"""Runs references and solutions for a benchmark, each in a process of its own.

Started once by the benchmark, this process imports torch and then forks: a worker costs milliseconds and not the seconds
of an import, and what one does to torch no other sees. A worker talks JSON lines over a socket; tensors are files.

    {"op": "build", "folder", "entry_file", "entry_symbol", "kind", "style", "device", ...}
    {"op": "run", "inputs", "roll", "outputs", "files"}          one call, outputs to files
    {"op": "time", "inputs", "rolls", "warmup", "keep", ...}     many calls, each on inputs it has not seen, timed
    {"op": "info"}
"""

import importlib
import inspect
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback

import torch

# Bound before any solution is loaded: one that replaces them in their modules changes nothing here.
_clock, _sleep, _roll, _equal, _empty, _dumps = (
    time.perf_counter_ns, time.sleep, torch.roll, torch.equal, torch.empty, json.dumps)
_DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int64": torch.int64,
    "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "bool": torch.bool,
}
if hasattr(torch, "float4_e2m1fn_x2"):
    _DTYPES["float4_e2m1"] = torch.float4_e2m1fn_x2
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ahead = getattr(torch.cuda, "_sleep", lambda cycles: None)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BuildError(Exception):
    pass


def bits(t):
    """The same elements as integers: comparing and moving them knows no NaN."""
    return t.view(_BITS[t.element_size()])


def load(spec, device):
    """A tensor from its file, or a number."""
    if "value" in spec:
        return spec["value"]
    dtype, shape = _DTYPES[spec["dtype"]], spec["shape"]
    count = 1
    for n in shape:
        count *= n
    if count == 0:
        return _empty(shape, dtype=dtype, device=device)
    size = dtype.itemsize
    flat = torch.from_file(spec["file"], shared=False, size=count * size, dtype=torch.uint8)
    return flat.view(_BITS[size]).reshape(shape).clone().to(device).view(dtype)


def place(base, spec, roll, to):
    """Copies an input to its place, moved around if it is random."""
    if not isinstance(base, torch.Tensor) or base.numel() == 0:
        return
    if spec.get("random") and roll != [0, 0] and base.dim():
        shifts, axes = (roll[1:], (-1,)) if base.dim() == 1 else (roll, (0, -1))
        bits(to).copy_(_roll(bits(base), tuple(shifts), axes))
    else:
        bits(to).copy_(bits(base))


def copies(bases):
    return [b.clone() if isinstance(b, torch.Tensor) else b for b in bases]


def store(tensors, files):
    for t, file in zip(tensors, files):
        data = bits(t.detach().contiguous().cpu())
        with open(file, "wb") as f:
            f.write(data.numpy().tobytes() if data.numel() else b"")


def described(tensors):
    return [{"shape": list(t.shape), "dtype": _NAMES.get(t.dtype, str(t.dtype))} for t in tensors]


class Worker:
    def __init__(self):
        self.fn = self.plan = None
        self.device = torch.device("cpu")

    def build(self, q):
        self.device, self.style = torch.device(q["device"]), q["style"]
        if self.device.index:
            # Streams and events are the current device's, which is the first unless said.
            torch.cuda.set_device(self.device)
        self.input_names, self.output_names = q["input_names"], q["output_names"]
        kind, symbol = q["kind"], q["entry_symbol"]
        path = os.path.join(q["folder"], q["entry_file"])
        if kind == "torch":
            from torch.utils import cpp_extension
            sources = [os.path.join(q["folder"], s) for s in q["sources"] if s.endswith((".cu", ".cpp", ".cc", ".cxx", ".c"))]
            module = cpp_extension.load(
                name="fir_" + q["key"][:16], sources=sources, with_cuda=q["language"] == "cuda", verbose=False,
                extra_include_paths=[q["folder"], *q["include_paths"]], extra_cflags=q["flags"],
                extra_cuda_cflags=q["flags"], build_directory=q["folder"])
            self.fn = getattr(module, symbol)
            return {}
        if kind == "tvm-ffi":
            import tvm_ffi
            pick = lambda *ends: [os.path.join(q["folder"], s) for s in q["sources"] if s.endswith(ends)] or None
            link = []
            if pick(".cu") or "cuda" in (t.lower() for t in q["target_hardware"]):
                # Host code calls the driver and cuBLAS; beside nvcc are the libraries to link with.
                nvcc = os.path.realpath(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
                link = [f"-L{os.path.join(os.path.dirname(os.path.dirname(nvcc)), 'lib64')}", "-lcuda", "-lcublas"]
            built = tvm_ffi.cpp.build(
                name="fir_" + q["key"][:16], cpp_files=pick(".cpp", ".cc", ".cxx", ".c"), cuda_files=pick(".cu"),
                extra_include_paths=[q["folder"], *q["include_paths"]], extra_cflags=q["flags"],
                extra_cuda_cflags=q["flags"], extra_ldflags=link, build_directory=q["folder"])
            self.fn = getattr(tvm_ffi.load_module(built), symbol)
            return {}
        sys.dont_write_bytecode = True
        sys.path.insert(0, q["folder"])
        name = q["entry_file"].removesuffix(".py").replace("/", ".")
        module = importlib.import_module(name)
        if not hasattr(module, symbol) or not callable(getattr(module, symbol)):
            raise BuildError(f"{q['entry_file']} has no function `{symbol}`")
        self.fn, self.plan = self.by_name(getattr(module, symbol)), getattr(module, "plan", None)
        return {}

    def by_name(self, fn):
        """The function with the definition's order of arguments: some name the same ones in another order."""
        order = self.input_names + (self.output_names if self.style == "destination" else [])
        try:
            names = [n for n in inspect.signature(fn).parameters if n != "plan"]
        except (TypeError, ValueError):
            return fn
        if names == order or sorted(names) != sorted(order):
            return fn
        places = [order.index(n) for n in names]
        return lambda *args, **more: fn(*[args[i] for i in places], **more)

    def planned(self, bases, specs):
        """The function to time: what `plan` made of the inputs that do not change is given to it."""
        if not callable(self.plan):
            return self.fn
        given = {n: b for n, b, s in zip(self.input_names, bases, specs) if not s.get("random")}
        state, fn = self.plan(**given), self.fn
        return lambda *args: fn(*args, plan=state)

    def outputs(self, q):
        made = []
        for spec in q["outputs"]:
            dtype = _DTYPES[spec["dtype"]]
            t = _empty(spec["shape"], dtype=dtype, device=self.device)
            if t.numel():
                bits(t).fill_(-1 if dtype.itemsize > 1 else 255)
            made.append(t)
        return made

    def results(self, returned, outs):
        if self.style == "destination":
            return outs
        if isinstance(returned, dict):
            returned = [returned[n] for n in self.output_names]
        returned = [] if returned is None else list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if len(returned) != len(self.output_names):
            raise RuntimeError(f"{len(returned)} outputs were returned, not {len(self.output_names)}")
        for name, spec, t in zip(self.output_names, self.specs, returned):
            if not isinstance(t, torch.Tensor) and spec["shape"]:
                raise RuntimeError(f"output `{name}` is {type(t).__name__}, not a tensor")
        return [t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=_DTYPES[s["dtype"]])
                for t, s in zip(returned, self.specs)]

    def edited(self, args, originals):
        return [n for n, a, o in zip(self.input_names, args, originals)
                if isinstance(o, torch.Tensor) and o.numel() and not _equal(bits(a), bits(o))]

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, q):
        self.specs = q["outputs"]
        bases = [load(s, self.device) for s in q["inputs"]]
        args = copies(bases)
        for b, spec, to in zip(bases, q["inputs"], args):
            place(b, spec, q["roll"], to)
        originals = copies(args)
        fn, outs = self.planned(bases, q["inputs"]), self.outputs(q) if self.style == "destination" else []
        self.sync()
        begin = _clock()
        returned = fn(*args, *outs)
        self.sync()
        ms = (_clock() - begin) / 1e6
        results = self.results(returned, outs)
        store(results, q["files"])
        return {"outputs": described(results), "edited": self.edited(args, originals), "ms": ms}

    def time(self, q):
        self.specs = q["outputs"]
        on_gpu = self.device.type == "cuda"
        bases = [load(s, self.device) for s in q["inputs"]]
        fn = self.planned(bases, q["inputs"])
        cold = _empty(max(q["cold"], 1), dtype=torch.uint8, device=self.device)
        times, kept, edited, late, leaks = [], [], set(), False, []
        # Two places, used in turn: what was remembered by address is of other numbers.
        places = [copies(bases), copies(bases)]
        for i, roll in enumerate(q["rolls"]):
            args = list(places[i % 2])
            if on_gpu:
                # Half a millisecond, in which the call is queued behind what it waits for: its kernels are timed, and not how
                # long Python takes to launch them. Inputs come after it, so work that runs ahead on another stream reads old ones.
                torch.cuda.synchronize()
                _ahead(1_000_000)
            for b, spec, to in zip(bases, q["inputs"], args):
                place(b, spec, roll, to)
            outs = self.outputs(q) if self.style == "destination" else []
            keep = i in q["keep"]
            originals = copies(args) if keep else []
            cold.fill_(i & 127)
            if on_gpu:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                returned = fn(*args, *outs)
                end.record()
                end.synchronize()
                # Work that another stream still has is not in the time: the device should be idle now.
                idle = _clock()
                torch.cuda.synchronize()
                leaks.append((_clock() - idle) / 1e3)
                ms = begin.elapsed_time(end)
            else:
                begin = _clock()
                returned = fn(*args, *outs)
                ms = (_clock() - begin) / 1e6
            if keep:
                results = self.results(returned, outs)
                first = [r.clone() for r in results]
                edited.update(self.edited(args, originals))
                _sleep(0.005)
                late |= any(not _equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in zip(first, results) if a.numel())
                store(first, q["files"][len(kept)])
                kept.append(described(first))
            if i >= q["warmup"]:
                times.append(ms)
        leaks.sort()
        return {"times": times, "kept": kept, "edited": sorted(edited), "late": late,
                "leak_us": leaks[len(leaks) // 2] if leaks else 0}

    def info(self, q):
        libs = {"torch": torch.__version__}
        for name in ("triton", "tilelang"):
            try:
                libs[name] = importlib.import_module(name).__version__
            except Exception:
                pass
        if q["device"] != "cpu":
            libs["cuda"] = str(torch.version.cuda)
            return {"hardware": torch.cuda.get_device_name(q["device"]), "libs": libs,
                    "l2": torch.cuda.get_device_properties(q["device"]).L2_cache_size}
        return {"libs": libs}


def serve(path, log):
    """A worker, until its socket closes."""
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    worker, reader = Worker(), channel.makefile("r")
    for line in reader:
        q = json.loads(line)
        try:
            answer = getattr(worker, q["op"])(q)
        except BaseException as e:
            built = q["op"] == "build"
            answer = {"error": "build" if built else "run", "log": str(e) if isinstance(e, BuildError) else traceback.format_exc()}
        sys.stdout.flush()
        sys.stderr.flush()
        channel.sendall((_dumps(answer) + "\n").encode())
    os._exit(0)


def once(path):
    """Questions from a file, for profilers; the first failure ends it."""
    worker = Worker()
    for q in json.load(open(path)):
        getattr(worker, q["op"])(q)


def main():
    if len(sys.argv) > 1:
        return once(sys.argv[1])
    print(json.dumps({"ready": torch.__version__}), flush=True)
    for line in sys.stdin:
        q = json.loads(line)
        if "spawn" in q:
            pid = os.fork()
            if pid == 0:
                sys.stdin.close()
                serve(q["spawn"], q["log"])
            print(json.dumps({"pid": pid}), flush=True)
        else:
            try:
                os.killpg(q["kill"], signal.SIGKILL)
            except OSError:
                try:
                    os.kill(q["kill"], signal.SIGKILL)
                except OSError:
                    pass
            _, status = os.waitpid(q["kill"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


main()
