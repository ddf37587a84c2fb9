"""A process that ends while one of Gloo's threads is the last owner of a tensor."""

import subprocess
import sys
from pathlib import Path

# The long switch interval keeps Gloo's thread from Python's lock until somebody gives it away, as a busy
# machine does now and then: without samestep this script dies of SIGABRT each time.
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import samestep.process_group

sys.setswitchinterval(30)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.zeros(2), async_op=True)
until = time.perf_counter() + 0.05
while time.perf_counter() < until:
    pass
print("done")
"""


def test_gloos_thread_lets_go_of_a_tensor_before_python_ends(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
