"""Tests that cannot apply, each with the reason. A test that samestep could pass does not belong here.

Those that cannot apply to samestep are run all the same: if one passes, it counts as passed.
"""

from __future__ import annotations

# To no class on CPU.
NEEDS_GPU = {
    "test_ddp_device": "looks at the CUDA index of the device that inputs were moved to",
    "test_ddp_has_finalized": "needs NCCL: over Gloo a backward that nobody answers waits for the time-out",
    "test_ddp_logging_data_gpu": "looks at the CUDA indices of device_ids and output_device",
    "test_ddp_sync_bn_training_vs_eval": "torch skips it as failing; its rank 0 runs a backward alone, which "
    "samestep's wrapper takes for everybody's",
    "test_ddp_profiling_execution_trace": "reads what NCCL writes into an execution trace",
}

# To any class but torch's: they look at its private parts.
_EVENTS = "counts events of torch's C++ reducer in a profile: new bucket plans sent, the graph searched"
_LOGGING = "looks at what only torch's C++ logger has: re-planned buckets, the environment, Gloo's threads"
_REDUCER = "calls private methods of torch's C++ reducer"
PRIVATE = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": "hands its C++ logger to C++ code",
    "test_ddp_control_flow_different_across_ranks": _REDUCER,
    "test_ddp_control_flow_same_across_ranks": _REDUCER,
    "test_ddp_logging_data_cpu": _LOGGING,
    "test_ddp_profiling_autograd_profiler": _EVENTS,
    "test_ddp_profiling_torch_profiler": _EVENTS,
    "test_different_graph_across_ranks": "looks at whether buckets were re-planned; samestep's never are",
}

# To samestep: they assert that training is refused where samestep trains, or the very words of a refusal.
_UNUSED = "asserts an error when a parameter got no gradient; samestep needs no find_unused_parameters"
_WORDING = "asserts a sentence of torch's; samestep refuses as well, in its own words (test_ddp_overlap.py)"
REFUSALS = {
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _UNUSED,
    "test_ddp_multiple_nested_unused_params_error": _UNUSED,
    "test_ddp_unused_params_rebuild_buckets_exception": _UNUSED,
    "test_invalid_static_graph": _WORDING,
}

NOT_FOR_SAMESTEP = PRIVATE | REFUSALS
