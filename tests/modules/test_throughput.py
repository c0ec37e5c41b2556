from tests.modules.throughput_cases import run_with_monitor
from tests.support import run_workers


def test_lightnings_throughput_monitor_works_with_batches_of_varying_size(tmp_path):
    texts, log, ours = run_workers(1, run_with_monitor, str(tmp_path))[0]
    # Once, not with each batch: without FLOPs of its own a module gets no utilisation.
    assert [("flops_per_batch" in text) for text in texts] == [True]
    header, *rows = log.splitlines()
    columns = header.split(",")
    samples = [float(value) for row in rows if (value := row.split(",")[columns.index("train/samples")])]
    assert samples == [8.0, 12.0, 18.0, 20.0, 28.0]
    assert len(ours) == 5
    assert all(value > 0 for value in ours)
