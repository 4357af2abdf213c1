/* The steps of a plan: how they are described, and that nothing they hold leads astray. */
#include "core.h"

#include <stdlib.h>

/* One step: ("take", ids, next) | ("select", words, ranks, next) | ("concat", ends, nexts) | ("stride", part, count, stride, rows)
 * | ("locate", part, ends, firsts, stride, rows) | ("offsets", part, (offsets of each axis)) | ("pieces", part, pieces)
 * | ("ranked", part, ranks, pieces, stride, rows); pieces are (first records, ((rows before, (offsets, ...)) of each axis)). */
static const int64_t *hold(Program *self, PyObject *object, int64_t *count) {
    Py_buffer *more = realloc(self->held, (size_t)(self->num_held + 1) * sizeof *more);
    if (more == NULL) return PyErr_NoMemory(), NULL;
    self->held = more;
    const int64_t *numbers = core_int64s(object, &self->held[self->num_held], count);
    if (numbers != NULL) self->num_held++;
    return numbers;
}

static int offsets_init(Program *self, Step *step, PyObject *axes) {
    if (PyTuple_Size(axes) > MAX_AXES) PyErr_SetString(PyExc_ValueError, "a step of offsets");
    for (Py_ssize_t k = 0; k < PyTuple_Size(axes) && k < MAX_AXES; k++) {
        int64_t others;
        step->numbers[k] = hold(self, PyTuple_GetItem(axes, k), &others);
        if (step->numbers[k] == NULL) return -1;
        if (others < 1 || (k && others - 1 != step->count)) PyErr_SetString(PyExc_ValueError, "a step of offsets");
        step->count = others - 1;
        step->num_axes = (int)k + 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* The offsets of each shard. All are as long as the shard has records, so that any record up to the last may be asked for. */
static int pieces_init(Program *self, Step *step, PyObject *pieces) {
    PyObject *records, *axes;
    int64_t edges, count;
    if (!PyTuple_Check(pieces)) return PyErr_SetString(PyExc_TypeError, "pieces are a tuple"), -1;
    if (!PyArg_ParseTuple(pieces, "OO!", &records, &PyTuple_Type, &axes)) return -1;
    const int64_t *firsts = step->own[0] = core_copied_int64s(records, &edges);
    if (firsts == NULL) return -1;
    Py_ssize_t num_axes = PyTuple_Size(axes);
    if (edges < 2 || firsts[0] != 0 || num_axes < 1 || num_axes > MAX_AXES) return PyErr_SetString(PyExc_ValueError, "a step of pieces"), -1;
    step->num_pieces = edges - 1;
    step->num_axes = (int)num_axes;
    step->pieces = calloc((size_t)(num_axes * step->num_pieces), sizeof *step->pieces);
    if (step->pieces == NULL) return PyErr_NoMemory(), -1;
    for (Py_ssize_t k = 0; k < num_axes; k++) {
        PyObject *before, *each;
        if (!PyTuple_Check(PyTuple_GetItem(axes, k))) return PyErr_SetString(PyExc_TypeError, "an axis of pieces is a tuple"), -1;
        if (!PyArg_ParseTuple(PyTuple_GetItem(axes, k), "OO!", &before, &PyTuple_Type, &each)) return -1;
        step->numbers[k] = hold(self, before, &count);
        if (step->numbers[k] == NULL) return -1;
        int is_fine = count == step->num_pieces && PyTuple_Size(each) == step->num_pieces;
        for (int64_t p = 0; is_fine && p < step->num_pieces; p++) {
            step->pieces[k * step->num_pieces + p] = hold(self, PyTuple_GetItem(each, (Py_ssize_t)p), &count);
            if (step->pieces[k * step->num_pieces + p] == NULL) return -1;
            is_fine = firsts[p + 1] >= firsts[p] && count > 0 && count - 1 == firsts[p + 1] - firsts[p];
        }
        if (!is_fine) return PyErr_SetString(PyExc_ValueError, "a step of pieces"), -1;
    }
    step->count = firsts[step->num_pieces];
    return 0;
}

static int ranked_init(Program *self, Step *step, PyObject *plan) {
    PyObject *name, *numbers, *pieces;
    long long stride, rows;
    int64_t ranks;
    if (!PyArg_ParseTuple(plan, "OiOOLL", &name, &step->part, &numbers, &pieces, &stride, &rows)) return -1;
    if (pieces_init(self, step, pieces)) return -1;
    const int64_t *held = hold(self, numbers, &ranks);
    if (held == NULL) return -1;
    int64_t blocks = step->count / RANK_RECORDS + (step->count % RANK_RECORDS > 0);
    if (step->num_axes != 1 || ranks != blocks + 1 || stride < 1 || rows < 1) return PyErr_SetString(PyExc_ValueError, "a step of ranks"), -1;
    step->numbers[1] = held;
    step->stride = stride;
    step->rows = rows;
    step->count = held[blocks];
    return 0;
}

int core_step_init(Program *self, Step *step, PyObject *plan) {
    PyObject *name = PyTuple_GetItem(plan, 0), *numbers, *more;
    long long count, stride, rows;
    if (name == NULL) return -1;
    if (!PyUnicode_Check(name)) return PyErr_SetString(PyExc_TypeError, "a step begins with its name"), -1;
    if (!PyUnicode_CompareWithASCIIString(name, "take")) {
        step->kind = TAKE;
        if (!PyArg_ParseTuple(plan, "OOi", &name, &numbers, &step->next)) return -1;
        step->numbers[0] = hold(self, numbers, &step->count);
    } else if (!PyUnicode_CompareWithASCIIString(name, "select")) {
        step->kind = SELECT;
        int64_t words = 0, ranks = 0;
        if (!PyArg_ParseTuple(plan, "OOOi", &name, &numbers, &more, &step->next)) return -1;
        step->numbers[0] = hold(self, numbers, &words);
        if (step->numbers[0] != NULL) step->numbers[1] = hold(self, more, &ranks);
        if (step->numbers[1] == NULL) return -1;
        if (ranks < 1 || words % BLOCK_WORDS || words / BLOCK_WORDS != ranks - 1) PyErr_SetString(PyExc_ValueError, "a step of select");
        else step->count = step->numbers[1][ranks - 1];
        step->rows = ranks - 1;
    } else if (!PyUnicode_CompareWithASCIIString(name, "concat")) {
        step->kind = CONCAT;
        if (!PyArg_ParseTuple(plan, "OOO", &name, &numbers, &more)) return -1;
        int64_t others = 0;
        step->numbers[0] = step->own[0] = core_copied_int64s(numbers, &step->count);
        if (step->numbers[0] != NULL) step->numbers[1] = step->own[1] = core_copied_int64s(more, &others);
        if (step->numbers[1] != NULL && others != step->count) PyErr_SetString(PyExc_ValueError, "a step of concat");
    } else if (!PyUnicode_CompareWithASCIIString(name, "stride")) {
        step->kind = STRIDE;
        if (!PyArg_ParseTuple(plan, "OiLLL", &name, &step->part, &count, &stride, &rows)) return -1;
        step->count = count;
        step->stride = stride;
        step->rows = rows;
    } else if (!PyUnicode_CompareWithASCIIString(name, "locate")) {
        step->kind = LOCATE;
        if (!PyArg_ParseTuple(plan, "OiOOLL", &name, &step->part, &numbers, &more, &stride, &rows)) return -1;
        step->stride = stride;
        step->rows = rows;
        int64_t others = 0;
        step->numbers[0] = hold(self, numbers, &step->count);
        if (step->numbers[0] != NULL) step->numbers[1] = hold(self, more, &others);
        if (step->numbers[1] != NULL && others != step->count) PyErr_SetString(PyExc_ValueError, "a step of locate");
    } else if (!PyUnicode_CompareWithASCIIString(name, "pieces")) {
        step->kind = PIECES;
        return PyArg_ParseTuple(plan, "OiO", &name, &step->part, &more) ? pieces_init(self, step, more) : -1;
    } else if (!PyUnicode_CompareWithASCIIString(name, "ranked")) {
        step->kind = RANKED;
        return ranked_init(self, step, plan);
    } else {
        step->kind = OFFSETS;
        if (!PyArg_ParseTuple(plan, "OiO!", &name, &step->part, &PyTuple_Type, &more)) return -1;
        return offsets_init(self, step, more);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Every index a step holds is checked here, so that running it needs no more than the sample's own check. */
int core_steps_check(const Program *self) {
    for (int k = 0; k < self->num_steps; k++) {
        const Step *step = &self->steps[k];
        int is_fine = 1;
        /* Steps only lead onwards, so that they end. */
        if (step->kind == TAKE || step->kind == SELECT) is_fine = step->next > k && step->next < self->num_steps;
        else if (step->kind == CONCAT)
            for (int64_t i = 0; i < step->count; i++)
                is_fine &= step->numbers[1][i] > k && step->numbers[1][i] < self->num_steps;
        else is_fine = step->part >= 0 && step->part < self->num_parts;
        if (is_fine && (step->kind == OFFSETS || step->kind == PIECES)) {
            const Gather *gather = self->gathers[step->part];
            is_fine = step->num_axes <= self->num_axes; /* as many as the work area has room for */
            for (int f = 0; f < gather->num_fields; f++)
                is_fine &= gather->fields[f].kind == RECORD || gather->fields[f].axis < step->num_axes;
        } else if (is_fine && step->kind != TAKE && step->kind != SELECT && step->kind != CONCAT) {
            const Gather *gather = self->gathers[step->part];
            for (int f = 0; f < gather->num_fields; f++)
                is_fine &= gather->fields[f].axis == 0 && (gather->fields[f].kind != RECORD || step->kind == LOCATE || step->kind == RANKED);
        }
        if (!is_fine) return PyErr_Format(PyExc_ValueError, "step %d of a plan leads nowhere", k), -1;
    }
    return 0;
}
