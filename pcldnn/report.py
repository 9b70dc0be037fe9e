"""What a training run tells: lines, a progress bar and a metrics file. Only rank 0 speaks."""
import json
import os
import sys

try:
    from tqdm import tqdm
except ImportError:      # a convenience, not a dependency of training
    tqdm = None


class Report:
    """Progress of one `Trainer.fit`; a context manager that leaves the terminal and the file in order.

    Parameters
    ----------
    printing : bool
        Lines on standard output, warnings and the bar on standard error.
    bar : bool, optional
        Default: if standard error is a terminal and tqdm is installed.
    metrics : path, optional
        JSONL file. A run that starts at step 0 replaces it; a resumed one drops what comes after its first step
        and goes on in it. A write error (disk full) is told once, and ends the file but not the training.
    interval : int
        Steps between lines.
    """

    def __init__(self, printing=True, bar=None, metrics=None, interval=10):
        if interval < 1:
            raise ValueError(f"log_interval = {interval!r}, wanted at least 1")
        self.printing, self.interval = printing, interval
        self.with_bar = printing and tqdm is not None and (sys.stderr.isatty() if bar is None else bar)
        self._path, self._file, self._bar = metrics, None, None
        self.metrics_error = None

    def start(self, step, last_step, epochs, steps_per_epoch):
        """Training is about to begin after `step` steps, of `last_step`. OSError: the metrics file cannot be opened."""
        self.first_step, self.last_step, self.epochs, self.steps_per_epoch = step, last_step, epochs, steps_per_epoch
        self.busy = self.interval_busy = self.interval_loss = 0.0
        self.interval_images = self.steps = 0
        if self._path is not None:
            self._file = _open_metrics(self._path, step)
        if self.with_bar:
            self._bar = tqdm(total=last_step, initial=step, unit="step", dynamic_ncols=True, file=sys.stderr)

    def step(self, record, images):
        """A step is done: `record` as in the metrics file, `images` over all ranks."""
        self._write(record)
        if not self.printing:
            return
        seconds = images / record["images_per_s"]
        self.busy, self.interval_busy = self.busy + seconds, self.interval_busy + seconds
        self.interval_images += images
        self.interval_loss += record["loss"] * images
        self.steps += 1
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {record['loss']:.4f}", refresh=False)
            self._bar.update()
        step = record["step"]
        if step % self.interval == 0 or step == self.last_step or self.steps == 1:
            left = self.busy / self.steps * (self.last_step - step)
            self.say(f"epoch {record['epoch']}/{self.epochs}  step {step}/{self.last_step}  "
                     f"loss {self.interval_loss / self.interval_images:.4f}  "
                     f"{self.interval_images / self.interval_busy:,.1f} images/s  left {duration(left)}")
            self.interval_busy = self.interval_loss = 0.0
            self.interval_images = 0

    def evaluation(self, record):
        self._write(record)
        if not self.printing:
            return
        self.say(f"epoch {record['epoch']}/{self.epochs}  validation: top-1 {100 * record['top1']:.2f} %  "
                 f"top-5 {100 * record['top5']:.2f} %  of {record['count']:,} samples")

    def finish(self, result):
        """Summary of the run."""
        self._close_bar()
        if result.stopped:
            self.say(f"stopped after step {result.step} ({result.stopped})")
        ran = len(result.losses)
        loss = f", loss of the last one {result.losses[-1]:.4f}" if ran else ""
        accuracy = f", top-1 {100 * result.evaluation.top1:.2f} %" if result.evaluation else ""
        self.say(f"done: {ran} steps in {duration(result.seconds)}, {result.images_per_s:,.1f} images/s"
                 f"{loss}{accuracy}")

    def say(self, text):
        if self.printing:
            self._print(text, sys.stdout)

    def warn(self, text):
        if self.printing:
            self._print(f"warning: {text}", sys.stderr)

    def _print(self, text, stream):
        if self._bar is not None:
            self._bar.clear()
        print(text, file=stream, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def _write(self, record):
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            self._file = None
            self.metrics_error = f"metrics file {os.fspath(self._path)!r}: {error.strerror}"
            self.warn(f"{self.metrics_error}; it ends here, training goes on")

    def _close_bar(self):
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._close_bar()
        if self._file is not None:
            self._file.close()


def _open_metrics(path, step):
    """Open the file for appending after the lines of steps up to `step` (and the evaluations among them)."""
    kept = []
    if step > 0 and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    if json.loads(line).get("step", 0) > step:
                        break
                except ValueError:      # the last line of a killed run
                    break
                kept.append(line)
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by Report)
    file.writelines(kept)
    file.flush()
    return file


def duration(seconds):
    """``m:ss`` or ``h:mm:ss``.

    >>> duration(61.2), duration(3600)
    ('1:01', '1:00:00')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
