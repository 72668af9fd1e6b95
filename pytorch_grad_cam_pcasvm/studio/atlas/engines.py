"""Engines: who makes the shards of an atlas. One job, the same numbers: this process, several, or a Ray cluster.

Warnings of other processes, which nobody watches, are collected there and given once here.
"""

import errno
import logging
import math
import os
import pickle
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import joblib
import torch
from joblib.externals.loky import get_reusable_executor

from pytorch_grad_cam_pcasvm.methods.warn_once import TOLD_ONCE, WarnOnce
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.runtime.errors import AutogradFallbackWarning, warn
from pytorch_grad_cam_pcasvm.studio.atlas.shards import KEPT

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.atlas.run import BuildOptions, Job


class ForwardedWarning(NamedTuple):
    """A warning of another process: module and name of its category, which this process may not have, and its text."""

    module: str
    name: str
    message: str

    @property
    def category(self) -> type[Warning]:
        """The category, or UserWarning for one that is not known here."""
        category = getattr(sys.modules.get(self.module), self.name, None)
        return category if isinstance(category, type) and issubclass(category, Warning) else UserWarning


@contextmanager
def collected() -> Iterator[list[ForwardedWarning]]:
    """Return a list that at the end has the warnings given meanwhile, which are not shown."""
    messages: list[ForwardedWarning] = []
    with warnings.catch_warnings(record=True) as caught:
        yield messages
    messages += [
        ForwardedWarning(warning.category.__module__, warning.category.__name__, str(warning.message))
        for warning in caught
    ]


def tell(collection: Iterable[ForwardedWarning], register: WarnOnce) -> None:
    """Give the warnings of other processes, each once, unless this process has given it: ``register`` knows of some."""
    for warning in dict.fromkeys(collection):
        category = warning.category
        if category in TOLD_ONCE:
            register.warn_once(category, warning.message)
        elif category is not AutogradFallbackWarning:  # told of the first image, whose path is that of all
            warn(warning.message, category)


def start_whole(start: Callable[[], Any]) -> Any:
    """Start processes in a thread: Ctrl-C would stop this one between two of them, and nothing would end the first."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # only a thread that has begun is waited for
        return pool.submit(_apart, start).result()


def _apart(start: Callable[[], Any]) -> Any:
    """Start processes in a thread that belongs to no pool."""
    # In a process that is forked, this is the only thread. If it were a pool's, the process would wait for it at its
    # end, that is for itself, and exit with an error: for the signal handler of any DataLoader, a worker that died.
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(start())
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return outcome.result()


class Worker:
    """Makes shards in a process of its own, with a part of the threads, and collects its warnings.

    Args:
        job: what to make.
        workers: number of processes that read images.
        threads: to compute with; None: as many as there are.
    """

    def __init__(self, job: "Job", workers: int, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.job, self.workers = job, workers

    def make(self, number: int) -> tuple[int, list[ForwardedWarning]]:
        """Return the number of images of a shard that is made now, and the warnings.

        Raises:
            OSError: this machine does not see the folder.
        """
        if not self.job.folder.is_dir():
            raise OSError(
                errno.ENOENT,
                f"{self.job.folder} is not there on {platform.node()}: out= must be a folder that all machines share",
            )
        with collected() as messages:
            images = sum(self.job.run([number], self.workers))
        return images, messages


def make_shards(
    job: "Job", numbers: Sequence[int], making: "BuildOptions", messages: list[ForwardedWarning]
) -> Iterator[int]:
    """Make shards in this process, in several, or on a Ray cluster; all of them give the same numbers.

    Args:
        job: what to make.
        numbers: numbers of the shards.
        making: in which processes.
        messages: receives the warnings of other processes.

    Returns:
        An iterator over the numbers of images of what is made.

    Raises:
        ImportError: Ray is not installed.
        TypeError: the network or the data set cannot be sent to another process.
        RuntimeError: a process died.
    """
    if making.engine == "ray":
        return _run_on_ray(job, numbers, making.processes, making.workers, messages)
    if making.processes is not None and making.processes > 1:
        return _run_in_processes(job, numbers, making.processes, making.workers, messages)
    return job.run(numbers, making.workers)


def _run_in_processes(
    job: "Job", numbers: Sequence[int], count: int, workers: int, messages: list[ForwardedWarning]
) -> Iterator[int]:
    """Make shards in several processes on this machine, each with its share of the threads, or a GPU."""
    try:
        sent = pickle.dumps(joblib.wrap_non_picklable_objects(job, keep_wrapper=False))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the network, the data set or an option cannot be sent to another process ({error}): make what it holds, "
            "such as an open file or a lock, when it is used, or leave processes=None"
        ) from error
    threads = max(1, torch.get_num_threads() // count)
    # By way of a file, which each process reads once.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job"
        path.write_bytes(sent)
        make = joblib.delayed(_make_shard)
        shards = (make(path, turn, number, workers, threads) for turn, number in enumerate(numbers))
        try:
            for images, warned in joblib.Parallel(count, backend="loky", return_as="generator_unordered")(shards):
                messages += warned
                yield images
        except BrokenProcessPool as error:
            reason = "a process of the build died (killed, or out of memory)"
            raise RuntimeError(f"{reason}{KEPT}: run the same build again") from error
        finally:
            get_reusable_executor().shutdown(kill_workers=True)  # which would hold the network for minutes


_workers: dict[Path, Worker] = {}  # that of a job which this process has read


def _make_shard(path: Path, turn: int, number: int, workers: int, threads: int) -> tuple[int, list[ForwardedWarning]]:
    """Make a shard in a process that another one started; the turn chooses the GPU of a process that begins."""
    if path not in _workers:
        _workers[path] = Worker(pickle.loads(path.read_bytes()), workers, threads)
        net = _workers[path].job.explainer.net
        if find_device(net).type == "cuda":
            net.to(torch.device("cuda", turn % torch.cuda.device_count()))
    return _workers[path].make(number)


def _run_on_ray(
    job: "Job", numbers: Sequence[int], count: int | None, workers: int, messages: list[ForwardedWarning]
) -> Iterator[int]:
    """Make shards on a Ray cluster, or on this machine, with a pool of actors."""
    # Not with Ray Data: its threads outlive an iteration that is broken off, and Ray ends a process in which they call
    # it after ray.shutdown.
    try:
        import ray
    except ImportError as error:
        raise ImportError("engine='ray' needs Ray: pip install 'pytorch_grad_cam_pcasvm[ray]'") from error
    with nullcontext() if ray.is_initialized() else _start_ray(ray):
        yield from _hand_to_actors(ray, job, numbers, count, workers, messages)


@contextmanager
def _start_ray(ray: Any) -> Iterator[None]:
    """Let Ray run on this machine.

    In a thread: Ctrl-C would stop this one between two of Ray's processes. The thread stays, as they end with it.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # only a thread that has begun is waited for
        try:
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
            thread.submit(ray.init, **options).result()
            yield
        finally:
            thread.submit(ray.shutdown).result()


def _hand_to_actors(
    ray: Any, job: "Job", numbers: Sequence[int], count: int | None, workers: int, messages: list[ForwardedWarning]
) -> Iterator[int]:
    actors: list[Any] = []
    try:
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if find_device(job.explainer.net).type == "cuda" else 0
        cpus = resources.get("CPU", 1)
        count = min(len(numbers), count or gpus or max(1, int(cpus) // 2))
        options = {
            "num_cpus": 0 if gpus else min(1.0, math.floor(100 * cpus / count) / 100),
            "num_gpus": 1 / math.ceil(count / gpus) if gpus else 0,
            "max_restarts": 3,  # not without end: a shard may need more memory than there is
            "max_task_retries": -1,  # those to a lost machine fail before Ray knows that it is lost
        }
        threads = None if gpus else max(1, int(cpus) // count)
        shared = [ray.put(job)]  # in a list: each actor unpacks it once
        make = ray.remote(_Actor).options(**options)
        actors += [make.remote(os.getcwd(), sys.path, workers, threads) for _ in range(count)]
        # Pending call -> actor. An actor gets a shard only when it is scheduled, that is, when begin() has returned.
        waiting = {actor.begin.remote(): actor for actor in actors}
        left = list(reversed(numbers))
        missing = len(numbers)
        while missing:
            (done,), _ = ray.wait(list(waiting))
            actor = waiting.pop(done)
            if (outcome := ray.get(done)) is not None:
                images, warned = outcome
                messages += [ForwardedWarning(*warning) for warning in warned]
                missing -= 1
                yield images
            if left:
                waiting[actor.make.remote(shared, left.pop())] = actor
            else:
                ray.kill(actor)  # another, begun again after its death, may be waiting for this one's room
    except ray.exceptions.RayError as error:
        if isinstance(cause := getattr(error, "cause", None), Exception):  # of a shard, as any process raises it
            raise cause from None
        reason = (
            f"Ray could not make the shards: {str(error).strip().splitlines()[-1]}. Modules that the network or the "
            "data set come from must be installed on every machine"
        )
        raise RuntimeError(f"{reason}{KEPT}: run the same build again") from error
    finally:
        for actor in actors:
            ray.kill(actor)


class _Actor:
    """The worker of an actor of Ray, which gets the job with its first shard."""

    def __init__(self, folder: str, paths: Sequence[str], workers: int, threads: int | None) -> None:
        # As multiprocessing does it: images are found, and what the network is made of is imported, where they were.
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [path for path in paths if path not in sys.path]
        self.options = workers, threads
        self.worker: Worker | None = None

    def begin(self) -> None:
        """Say that there is room for this actor."""

    def make(self, shared: Sequence[Any], number: int) -> tuple[int, list[ForwardedWarning]]:
        """Make a shard; see :meth:`Worker.make`."""
        import ray

        self.worker = self.worker or Worker(ray.get(shared[0]), *self.options)
        return self.worker.make(number)
