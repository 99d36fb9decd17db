"""Whole gradient buffers: used again where they fit, and never more than one that nobody has."""

from __future__ import annotations

import torch

from counterflow.parallel.zero.buffers import Buffers

CPU = torch.device("cpu")


def test_a_buffer_of_the_same_size_is_the_same_memory_and_zero() -> None:
    buffers = Buffers(CPU)
    first = buffers.take(100)
    first.fill_(3.0)
    address = first.data_ptr()
    buffers.give(first)
    again = buffers.take(90)
    assert again.data_ptr() == address
    assert again.shape == (90,)
    assert not again.any()
    buffers.give(again)  # a view: the whole of it is kept
    assert buffers.take(100).data_ptr() == address


def test_a_much_larger_one_is_let_go_of() -> None:
    buffers = Buffers(CPU)
    buffers.give(buffers.take(1000))
    assert buffers.take(100).untyped_storage().nbytes() == 400


def test_of_two_the_smaller_is_kept() -> None:
    buffers = Buffers(CPU)
    one, other = buffers.take(100), buffers.take(101)
    small = one.data_ptr()
    buffers.give(other)
    buffers.give(one)
    assert buffers.take(100).data_ptr() == small
    buffers.clear()
