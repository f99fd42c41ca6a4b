"""Workers: threads that read ahead, and end at once when nobody wants what they read."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable

import torch

Task = Callable[[], None]


class AtOnce:
    """Runs each task where it is submitted, before `submit` returns; a task must not raise."""

    closed = False

    def submit(self, task: Task) -> None:
        """Run a task."""
        task()


class Workers:
    """Threads that run tasks in the order in which they come; a task must not raise.

    Decoders and torch let other Python threads run beside them. Each thread computes alone: the other cores have other
    workers, or the training, to run.
    """

    def __init__(self, count: int):
        self.tasks: deque[Task] = deque()
        self.change = threading.Condition()
        self.closed = False
        started = threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(target=self._work, args=(started,), daemon=True, name=f"mural-reader-{i}")
            for i in range(count)
        ]
        cores = torch.get_num_threads()
        for thread in self.threads:
            thread.start()
        started.wait()
        torch.set_num_threads(cores)  # a thread's own number is also what threads that start later would take
        # A thread that is inside torch when the interpreter ends would take the process down with it.
        atexit.register(self.close)

    def submit(self, task: Task) -> None:
        """Queue a task; dropped where the workers were closed."""
        with self.change:
            if not self.closed:
                self.tasks.append(task)
                self.change.notify()

    def close(self) -> None:
        """Drop what is queued, and wait for the threads to end: each finishes the task it is in."""
        with self.change:
            self.closed = True
            self.tasks.clear()
            self.change.notify_all()
        for thread in self.threads:
            thread.join()
        atexit.unregister(self.close)

    def _work(self, started: threading.Barrier) -> None:
        torch.set_num_threads(1)
        started.wait()
        del started
        while True:
            with self.change:
                while not self.tasks and not self.closed:
                    self.change.wait()
                if self.closed:
                    return
                task = self.tasks.popleft()
            task()
            del task
