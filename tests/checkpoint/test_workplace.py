"""What a save that failed leaves behind: nothing, though others were still writing."""

import shutil
import time

import numpy as np
import pytest

from autopar.checkpoint.folder import close_workplace, open_workplace
from autopar.checkpoint.owner import release
from autopar.runtime.ray.worker.disk import Disk, OnDisk


def test_a_write_that_is_called_off_writes_nothing_behind_its_end(tmp_path):
    """When `write` has ended, no tile is under way: who takes the folder away then has taken it away for good."""
    count, shape = 60, (512, 512)

    class CalledOff(Disk):
        def _stand(self, save):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:  # the first tile is written, the others are under way
                self.forget(save)
            super()._stand(save)

    disk = CalledOff()
    random = np.random.default_rng(0)
    disk.take(1, [random.normal(size=shape).astype(np.float32) for _ in range(count)])
    arrays = [OnDisk(f"a{k}", shape, "float32", shape) for k in range(count)]
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(InterruptedError):
        disk.write(1, str(folder), arrays, [(k, k, ((0, 512), (0, 512))) for k in range(count)])
    shutil.rmtree(folder)
    time.sleep(0.3)
    assert not folder.exists()


def test_a_folder_goes_though_a_file_comes_up_in_it(tmp_path, monkeypatch):
    place, remove, late = open_workplace(tmp_path), shutil.rmtree, ["a file of one who was still writing"]

    def rmtree(path, **how):
        remove(path, **how)
        if late:
            path.mkdir()
            (path / "late").write_text(late.pop())

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    close_workplace(place)
    assert not late and not place.exists()
    release(tmp_path)
