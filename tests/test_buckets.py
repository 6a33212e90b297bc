from __future__ import annotations

import subprocess
import sys

import pytest

from ms_spec.verify.buckets import Buckets


@pytest.mark.parametrize(
    "device,seqs,k,options,batches,widths",
    [
        ("CPU", 8, 4, {}, (1, 8), (1, 5)),
        ("CPU", 1, 4, {}, (1,), (1, 5)),
        ("CPU", 8, 0, {}, (1, 8), (1,)),
        ("CPU", 8, 40, {"variable_width": True}, (1, 8), (1, 41)),
        ("Ascend", 8, 4, {}, (1, 2, 4, 8), (1, 5)),
        ("Ascend", 12, 4, {}, (1, 2, 4, 8, 12), (1, 5)),
        ("Ascend", 8, 15, {"variable_width": True}, (1, 2, 4, 8), (1, 2, 4, 8, 16)),
        ("Ascend", 8, 6, {"variable_width": True}, (1, 2, 4, 8), (1, 2, 4, 7)),
        ("CPU", 8, 4, {"capture_sizes": [20, 5, 40]}, (1, 4, 8), (1, 5)),
        ("Ascend", 8, 4, {"capture_sizes": [10, 20]}, (2, 4, 8), (1, 5)),
        ("Ascend", 8, 4, {"capture_sizes": [10, 60, 600]}, (2, 8), (1, 5)),
    ],
)
def test_default_and_given_sizes(device, seqs, k, options, batches, widths):
    buckets = Buckets.for_device(device, seqs, k, **options)
    assert (buckets.batches, buckets.widths) == (batches, widths)


@pytest.mark.parametrize("device", ["CPU", "Ascend"])
@pytest.mark.parametrize("k", [0, 1, 4, 15])
@pytest.mark.parametrize("seqs", [1, 3, 8, 17])
def test_pick_holds_everything_that_can_come(device, seqs, k):
    buckets = Buckets.for_device(device, seqs, k)
    for n in range(1, seqs + 1):
        for w in range(1, k + 2):
            bucket = buckets.pick(n, w)
            assert bucket[0] in buckets.batches and bucket[1] in buckets.widths
            assert bucket[0] >= n and bucket[1] >= w
            assert bucket[0] == min(b for b in buckets.batches if b >= n)
    with pytest.raises(ValueError):
        buckets.pick(seqs + 1, 1)
    with pytest.raises(ValueError):
        buckets.pick(1, k + 2)


@pytest.mark.parametrize(
    "sizes,parts",
    [([5, 12], ["12", "= 5", "10 or 15"]), ([3], ["3", "nearest is 5"]), ([0], ["0"]), ([-5], ["-5"]), ([], ["[]"])],
)
def test_a_wrong_capture_size_is_named_with_the_nearest_right_ones(sizes, parts):
    with pytest.raises(ValueError) as error:
        Buckets.for_device("CPU", 8, 4, capture_sizes=sizes)
    assert "\n" not in str(error.value) and "cudagraph_capture_sizes" in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_ascend_takes_sixteen_columns():
    assert Buckets.for_device("Ascend", 1, 15).widths == (1, 16)
    with pytest.raises(ValueError, match=r"num_speculative_tokens=16.*15 or fewer"):
        Buckets.for_device("Ascend", 1, 16)


def test_it_needs_no_mindspore():
    code = "import sys, ms_spec.verify.buckets, ms_spec.verify.rates; assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
