"""Labels of a chunk: the texts that occur in its rows, whatever the dictionary of the file holds."""

import numpy as np
import pyarrow
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.prepare.table.read.chunks import Chunk

TEXTS = ["red", "green", "", "größe"]


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12), st.permutations(range(4)))
@example([0, 1, 2], [0, 1, 2, 3])  # the last text occurs in no row
@example([1, 2, 3, None], [0, 1, 2, 3])  # nor the first, and a null
@example([0, 1, 2, 3, None], [0, 1, 2, 3])
def test_labels_are_the_texts_that_occur(rows, order):
    dictionary = [TEXTS[k] for k in order]
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(rows, pyarrow.int32()), dictionary)
    texts, codes = Chunk([], None, np.zeros(len(rows)), pyarrow.table({"c": column})).labels("c")
    expected = [None if k is None else dictionary[k] for k in rows]
    assert [None if code < 0 else texts[code] for code in codes.tolist()] == expected
    assert texts == [text for text in dictionary if text in expected]
