"""Exchanges of programs: lines of HLO as compilers write them, and bytes and seconds worked out by hand."""

from collections import Counter

import pytest

from detspec.model.dense import dense_config, with_fields
from detspec.planning.exchanges import (
    Exchange,
    added_floats,
    as_gathers,
    exchange_seconds,
    found_in,
    gathered_weights,
    gathers,
    received_bytes,
    sums,
)
from detspec.presets import preset
from detspec.roofline import Links

LLAMA = preset("llama3_1_8b")
TINY = dense_config(vocab_size=32, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, dtype="bfloat16")
LINKS = Links(num=2, bytes_per_s=1e6, cut_bytes_per_s=2e6, hops=3, hop_s=1e-3, start_s=0.0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%a = bf16[256,4096]{1,0:T(8,128)(2,1)S(1)} all-gather(%b), replica_groups={{0,1,2,3}}, dimensions={1}",
            Exchange("all-gather", "bf16", 256 * 4096, 4),
        ),
        (
            "%a = (bf16[256,512]{0,1}, bf16[256,4096]{0,1}) all-gather-start(%b), channel_id=1, replica_groups=[1,8]<=[8]",
            Exchange("all-gather", "bf16", 256 * 4096, 8),
        ),
        (
            "%a = u32[256,4096]{0,1} all-reduce-start(%b), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add",
            Exchange("all-reduce", "u32", 256 * 4096, 8),
        ),
        (
            "%a = (f32[1,5,80]{2,1,0}, f32[1,5,80]{2,1,0}) all-to-all(%b, %c), channel_id=9, replica_groups={{0,1}}",
            Exchange("all-to-all", "f32", 2 * 5 * 80, 2),
        ),
        (
            "%a = f32[64,16]{1,0} reduce-scatter(%b), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add",
            Exchange("reduce-scatter", "f32", 2 * 64 * 16, 2),
        ),
        (
            "%a = u32[5,64]{1,0} all-reduce(%b), replica_groups=mesh['kv'=2,'query'=4] {'kv','query'}, to_apply=%add",
            Exchange("all-reduce", "u32", 5 * 64, 8),
        ),
        (
            "%a = u32[5,64]{1,0} all-gather(%b), replica_groups=mesh['kv'=2,'query'=4] {'query'}, dimensions={0}",
            Exchange("all-gather", "u32", 5 * 64, 4),
        ),
        (
            "%a = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%b), source_target_pairs={{0,1},{1,0}}",
            Exchange("collective-permute", "f32", 32, 2),
        ),
    ],
)
def test_collective_is_read_from_hlo(line: str, expected: Exchange):
    assert found_in(f"ENTRY %main {{\n  {line}\n}}") == {expected: 1}


def test_what_is_no_collective_is_not_counted():
    done = '%d = bf16[256,4096]{0,1} all-gather-done(%all-gather-start), metadata={op_name="jit(f)/all_gather"}'
    assert found_in(f"{done}\n%e = f32[8]{{0}} fusion(%all-gather), calls=%f") == {}


def test_sums_of_floats_are_told_from_sums_of_bits_and_from_copies():
    floats = [Exchange("all-reduce", "bf16", 8, 4), Exchange("reduce-scatter", "f32", 8, 4)]
    others = [Exchange("all-reduce", "u32", 8, 4), Exchange("all-gather", "f32", 8, 4), Exchange("all-reduce", "s32", 8, 4)]
    assert added_floats(dict.fromkeys([*floats, *others], 1)) == floats


def test_gathered_weight_is_told_from_values():
    weight = Exchange("all-gather", "bf16", 14336 * 4096, 4)
    assert gathered_weights({weight: 1, Exchange("all-gather", "bf16", 256 * 4096, 4): 1}, LLAMA) == [weight]


def test_layer_of_llama_receives_13_bytes_for_each_row_and_channel_where_sums_receive_8():
    """Times (n-1)/n. Heads and both outputs are as wide as the stream, hidden values 3.5 times: 2 + 2 + 7 + 2 bytes.
    Sums: two arrays of 2 bytes, each scattered and gathered."""
    R, D, n = 256, LLAMA.d_model, 8
    ours, others = (
        received_bytes(two) - received_bytes(one)
        for one, two in (
            (gathers(LLAMA, R, n, whole_layers=1), gathers(LLAMA, R, n, whole_layers=2)),
            (*(sums(with_fields(LLAMA, num_layers=layers), R, n) for layers in (1, 2)),),
        )
    )
    assert (ours, others) == (13 * R * D * 7 / 8, 8 * R * D * 7 / 8)


def test_filling_the_cache_exchanges_neither_the_last_layer_nor_logits():
    assert gathers(TINY, 6, 2, whole_layers=1, head=False) == {
        Exchange("all-reduce", "u32", 6 * 8, 2): 1,
        Exchange("all-gather", "bf16", 6 * 8, 2): 3,
        Exchange("all-gather", "bf16", 6 * 16, 2): 1,
    }


def test_logits_come_as_whole_rows_padded_to_the_chips():
    """5 rows on 4 chips: each takes 2 of 8."""
    assert gathers(TINY, 5, 4, whole_layers=0) == {
        Exchange("all-reduce", "u32", 5 * 8, 4): 1,
        Exchange("all-to-all", "f32", 2 * 32, 4): 1,
        Exchange("all-gather", "s32", 8, 4): 1,
        Exchange("all-gather", "u32", 8, 4): 1,
    }


def test_gather_that_is_written_as_a_sum_of_integers_counts_as_a_gather():
    """The formula has one of u32 as a gather, but none of other integers, of floats, or of another width."""
    by_formula = gathers(TINY, 5, 4, whole_layers=0)
    short = Exchange("all-reduce", "u32", 8, 4)
    others = [Exchange("all-reduce", "u32", 5 * 8, 4), Exchange("all-reduce", "f32", 8, 4), Exchange("all-reduce", "s32", 9, 4)]
    counted = as_gathers(Counter([short, *others]), by_formula)
    assert counted == Counter([short._replace(kind="all-gather"), *others])


def test_collectives_take_hops_and_bytes():
    """3 hops of 1 ms at 1 MB/s, of 1000 float32: 3/4 of 4 kB once, or twice in two rounds.

    An all-to-all moves 4 x 4 kB in all; a quarter crosses the middle one way, at 2 MB/s, in less than 3 kB take to arrive."""
    assert exchange_seconds({Exchange("all-gather", "f32", 1000, 4): 2}, LINKS) == pytest.approx(2 * 6e-3, rel=1e-12)
    assert exchange_seconds({Exchange("all-reduce", "f32", 1000, 4): 1}, LINKS) == pytest.approx(12e-3, rel=1e-12)
    assert exchange_seconds({Exchange("all-to-all", "f32", 1000, 4): 1}, LINKS) == pytest.approx(6e-3, rel=1e-12)
    assert exchange_seconds({Exchange("all-to-all", "f32", 1000, 16): 1}, LINKS) == pytest.approx(11e-3, rel=1e-12)
