"""Operators and links by sizes worked out by hand, and devices by their datasheets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.framework.planning.cluster import cluster_names, load_cluster
from counterflow.framework.planning.kernels import Efficiencies, ModelledKernels, efficiencies
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.links import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Group, Links
from counterflow.framework.planning.measured import measured_kernels, surface
from counterflow.framework.planning.step import estimate_step
from counterflow.models.config import ModelConfig

A100 = load_cluster("a100")
IDEAL = Efficiencies(gemm=1.0, memory=1.0, attention=1.0, intra=1.0, inter=1.0, launch_s=1e-6)


def test_a_large_product_takes_its_flops_over_the_peak() -> None:
    kernels = ModelledKernels(device=A100.device, share=IDEAL)
    # 108 x 10 tiles of 256 x 128: ten full waves.
    seconds = kernels.gemm(256 * 108, 16384, 128 * 10)
    flops = 2 * 256 * 108 * 128 * 10 * (16384 + 64)
    assert seconds == pytest.approx(flops / 312e12)


def test_one_tile_more_than_a_wave_takes_another_wave() -> None:
    kernels = ModelledKernels(device=A100.device, share=IDEAL)
    one_wave, two_waves = 128 * 9, 128 * 10  # 108 and 120 tiles of 12 rows of them
    assert kernels.gemm(256 * 12, 8192, two_waves) == pytest.approx(
        2 * kernels.gemm(256 * 12, 8192, one_wave)
    )


def test_a_thin_product_takes_what_its_operands_take_from_memory() -> None:
    kernels = ModelledKernels(device=A100.device, share=IDEAL)
    m, k, n = 8, 8192, 65536
    assert kernels.gemm(m, k, n) == pytest.approx(2 * (m * k + k * n + m * n) / 2039e9)


def test_nothing_is_shorter_than_a_launch() -> None:
    kernels = ModelledKernels(device=A100.device, share=IDEAL)
    assert kernels.gemm(1, 1, 1) == kernels.moved(1) == 1e-6


def test_a_ring_within_a_node_passes_on_its_share_twice() -> None:
    links = Links(cluster=A100, share=IDEAL)
    group = Group.strided(8, 1, 8)
    expected = 2 * (1e9 * 7 / 8 / 300e9 + 7 * 3e-6)
    assert links.collective(ALL_REDUCE, 1e9, group) == pytest.approx(expected)
    assert links.collective(ALL_GATHER, 1e9, group) == pytest.approx(expected / 2)


def test_ranks_of_a_node_together_use_all_of_its_cards() -> None:
    links = Links(cluster=A100, share=IDEAL)
    spread, packed = Group.strided(4, 8, 8), Group.strided(32, 1, 8)
    assert (spread.per_node, spread.num_nodes) == (1, 4)
    assert (packed.per_node, packed.num_nodes) == (8, 4)
    assert links.collective(ALL_GATHER, 1e9, spread) == pytest.approx(0.75e9 / 25e9, rel=1e-2)
    assert links.collective(ALL_GATHER, 1e9, packed) == pytest.approx(31 / 32 * 1e9 / 200e9, rel=2e-2)


def test_an_exchange_over_nodes_is_bound_by_cards() -> None:
    links = Links(cluster=A100, share=IDEAL)
    seconds = links.collective(ALL_TO_ALL, 1e9, Group.strided(16, 1, 8))
    assert seconds == pytest.approx(0.5e9 / 25e9, rel=1e-2)


def test_a_group_of_one_communicates_nothing() -> None:
    assert Links(cluster=A100, share=IDEAL).collective(ALL_REDUCE, 1e9, Group.strided(1, 1, 8)) == 0.0


def test_a_measured_shape_has_its_own_efficiency() -> None:
    kernels = measured_kernels(load_cluster("b200").device)
    assert kernels.gemm(4096, 8192, 10240, "TN") == pytest.approx(
        2 * 4096 * 8192 * 10240 / (2250e12 * 0.6452)
    )
    # The measurement counts a causal attention whole.
    whole = 4 * 64 * 4096**2 * 128
    assert kernels.attention(1, 4096, 64, 8, 128, 128, backward=False) == pytest.approx(
        whole / (2250e12 * 0.8715)
    )


def test_a_shape_between_measured_ones_is_between_their_efficiencies() -> None:
    found = surface([((64.0,), 0.2), ((256.0,), 0.4)], default=0.9)
    assert found.at((128.0,)) == pytest.approx(0.3)
    assert found.at((64.0,)) == 0.2
    assert surface([], default=0.9).at((1.0,)) == 0.9


def test_every_cluster_of_the_configs_loads() -> None:
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.device.bf16_flops > 1e14
        assert cluster.intra_bytes_per_s > cluster.inter_bytes_per_s
    assert load_cluster("h800_16384").num_gpus == 16384


@pytest.mark.parametrize("name", ["h900", "h800_x", "nowhere/a.yaml"])
def test_an_unknown_cluster_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match="a100, a100_40gb"):
        load_cluster(name)


def test_an_efficiency_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="share of a peak"):
        Efficiencies(gemm=1.2)
    assert 0.6 < efficiencies("a100").gemm < 0.85


def test_small_layers_wait_for_the_host() -> None:
    model = ModelConfig(vocab_size=1024, hidden_size=128, intermediate_size=512, num_layers=4)
    layout = Layout(seq_length=128, vocab_size=1024, num_microbatches=1, recompute="full")
    step = estimate_step(model, layout, A100, replace(IDEAL, host_s=1e-5))
    # 4 layers: 30 kernels forward, as many again, and 60 backward.
    assert step.pipeline_s == pytest.approx(4 * 120 * 1e-5)
