/* The keyed permutation of [0, n): a Feistel network on a x b >= n with cycle walking, in blocks of 256.
 *
 * Twin of order/permute.py and order/hashing.py, number for number. A block's halves lie in two small arrays, so
 * that every round is one plain loop that compilers turn into vector code: 92 M indices/s of one core at n = 1e12. */
#include "core.h"

#define BLOCK 256
#define GOLDEN 0x9E3779B97F4A7C15u

static uint64_t mix64(uint64_t v) {
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
    return v ^ (v >> 31);
}

static inline uint32_t mix32(uint32_t v) {
    v = (v ^ (v >> 16)) * 0x7FEB352Du;
    v = (v ^ (v >> 15)) * 0x846CA68Bu;
    return v ^ (v >> 16);
}

void core_round_keys(uint64_t seed, uint64_t lane, uint64_t stream, int rounds, uint32_t *keys) {
    uint64_t base = mix64(seed ^ 0x6D696C6C72616365u ^ mix64(lane));
    uint64_t state = mix64(mix64(stream + GOLDEN) ^ base);
    for (int r = 0; r < rounds; r++) keys[r] = (uint32_t)(mix64(state + (uint64_t)(r + 1) * GOLDEN) >> 32);
}

Sides core_sides(uint64_t n) {
    uint64_t root = 0; /* isqrt(n - 1), bit by bit */
    for (uint64_t bit = (uint64_t)1 << 31; bit; bit >>= 1)
        if ((root + bit) * (root + bit) <= n - 1) root += bit;
    Sides sides = {n, n > 1 ? root + 1 : 1, 0, n < 1024 ? 24 : 8};
    sides.b = (n + sides.a - 1) / sides.a;
    sides.b += sides.a & sides.b & 1;
    return sides;
}

/* One round on a block: to[i] = to[i] +- hash(from[i]) modulo size. */
#define ROUND(NAME, TYPE)                                                                                         \
    static void NAME(TYPE *restrict to, const TYPE *restrict from, TYPE size, uint32_t key, int is_backward,\
                     int count) {                                                                                   \
        if (is_backward) {                                                                                          \
            for (int i = 0; i < count; i++) {                                                                       \
                TYPE sum = to[i] + size - (TYPE)(((uint64_t)mix32((uint32_t)from[i] ^ key) * size) >> 32);          \
                to[i] = sum >= size ? sum - size : sum;                                                             \
            }                                                                                                       \
        } else {                                                                                                    \
            for (int i = 0; i < count; i++) {                                                                       \
                TYPE sum = to[i] + (TYPE)(((uint64_t)mix32((uint32_t)from[i] ^ key) * size) >> 32);                 \
                to[i] = sum >= size ? sum - size : sum;                                                             \
            }                                                                                                       \
        }                                                                                                           \
    }

/* A network step on a block of values below a x b. */
#define STEP(NAME, ONE_ROUND, TYPE)                                                                               \
    static void NAME(const Sides *s, const uint32_t *keys, uint64_t *values, int is_backward, int count) {          \
        TYPE left[BLOCK], right[BLOCK];                                                                             \
        for (int i = 0; i < count; i++) {                                                                           \
            uint64_t quotient = values[i] / s->b;                                                                   \
            left[i] = (TYPE)quotient;                                                                               \
            right[i] = (TYPE)(values[i] - quotient * s->b);                                                         \
        }                                                                                                           \
        for (int k = 0; k < s->rounds; k++) {                                                                       \
            int r = is_backward ? s->rounds - 1 - k : k;                                                            \
            if (r % 2 == 0) ONE_ROUND(left, right, (TYPE)s->a, keys[r], is_backward, count);                        \
            else ONE_ROUND(right, left, (TYPE)s->b, keys[r], is_backward, count);                                   \
        }                                                                                                           \
        for (int i = 0; i < count; i++) values[i] = (uint64_t)left[i] * s->b + right[i];                            \
    }

ROUND(round_narrow, uint32_t)
ROUND(round_wide, uint64_t)
STEP(step_narrow, round_narrow, uint32_t)
STEP(step_wide, round_wide, uint64_t)

static void step(const Sides *s, const uint32_t *keys, uint64_t *values, int is_backward, int count) {
    /* Halves below 2^31 add up within 32 bits, in half the vector lanes. */
    if (s->b <= 0x80000000u && s->a <= 0x80000000u) step_narrow(s, keys, values, is_backward, count);
    else step_wide(s, keys, values, is_backward, count);
}

void core_permute(const Sides *s, const uint32_t *keys, uint64_t *values, size_t count, int is_backward) {
    uint64_t block[BLOCK];
    uint32_t places[BLOCK];
    for (size_t first = 0; first < count; first += BLOCK) {
        size_t size = count - first < BLOCK ? count - first : BLOCK;
        memcpy(block, values + first, size * sizeof *block);
        for (uint32_t i = 0; i < size; i++) places[i] = i;
        for (size_t left = size; left;) { /* values of n or more are walked again: few, and together */
            step(s, keys, block, is_backward, (int)left);
            size_t outside = 0;
            for (size_t i = 0; i < left; i++) {
                values[first + places[i]] = block[i];
                if (block[i] >= s->n) {
                    block[outside] = block[i];
                    places[outside++] = places[i];
                }
            }
            left = outside;
        }
    }
}

/* One round of values that each have a permutation of their own. ``room`` keeps the sum within 32 bits. */
static void round_each(uint32_t *restrict to, const uint32_t *restrict from, const uint32_t *restrict sizes,
                       const uint32_t *restrict keys, int count) {
    for (int i = 0; i < count; i++) {
        uint32_t room = sizes[i] - (uint32_t)(((uint64_t)mix32(from[i] ^ keys[i]) * sizes[i]) >> 32);
        to[i] += to[i] >= room ? 0u - room : sizes[i] - room;
    }
}

void core_permute_each(const Sides *const *sides, uint32_t (*keys)[EACH], uint64_t *values, int count) {
    uint32_t left[EACH], right[EACH], a[EACH], b[EACH], own[MAX_ROUNDS];
    for (int i = 0; i < count; i++) {
        uint64_t quotient = values[i] / sides[i]->b;
        left[i] = (uint32_t)quotient;
        right[i] = (uint32_t)(values[i] - quotient * sides[i]->b);
        a[i] = (uint32_t)sides[i]->a;
        b[i] = (uint32_t)sides[i]->b;
    }
    for (int r = 0, busy = count; r < MAX_ROUNDS; r++) {
        while (busy && sides[busy - 1]->rounds <= r) busy--;
        if (r % 2 == 0) round_each(left, right, a, keys[r], busy);
        else round_each(right, left, b, keys[r], busy);
    }
    for (int i = 0; i < count; i++) {
        values[i] = (uint64_t)left[i] * b[i] + right[i];
        if (values[i] < sides[i]->n) continue;
        for (int r = 0; r < sides[i]->rounds; r++) own[r] = keys[r][i];
        core_permute(sides[i], own, values + i, 1, 0); /* few are walked again */
    }
}

/* permute(values, n, keys, is_backward): uint64 values in place; keys of all, or of each value. */
static PyObject *permute(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer values, keys;
    unsigned long long n;
    int is_backward;
    if (!PyArg_ParseTuple(args, "w*Ky*p", &values, &n, &keys, &is_backward)) return NULL;
    size_t count = (size_t)values.len / sizeof(uint64_t);
    Sides sides = core_sides(n == 0 || n > INT64_MAX ? 1 : n);
    size_t row = (size_t)sides.rounds * sizeof(uint32_t);
    uint64_t *numbers = values.buf;
    const char *rows = keys.buf;
    int is_wrong = n == 0 || n > INT64_MAX || (uintptr_t)numbers % 8 || (uintptr_t)rows % 4 || ((size_t)keys.len != row && (size_t)keys.len != row * count);
    for (size_t i = 0; i < count && !is_wrong; i++) is_wrong = numbers[i] >= n;
    if (is_wrong) {
        PyErr_Format(PyExc_ValueError, "permute: values below n=%llu and %d keys, for all or for each", n, sides.rounds);
    } else {
        Py_BEGIN_ALLOW_THREADS
        for (size_t first = 0, last; first < count; first = last) { /* runs of equal keys */
            last = count;
            if ((size_t)keys.len != row)
                for (last = first + 1; last < count && !memcmp(rows + first * row, rows + last * row, row); last++) {}
            const char *own = (size_t)keys.len == row ? rows : rows + first * row;
            core_permute(&sides, (const uint32_t *)own, numbers + first, last - first, is_backward);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&keys);
    if (is_wrong) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef core_permute_functions[] = {
    {"permute", permute, METH_VARARGS, "permute(values, n, keys, is_backward): moves uint64 values below n in place."},
    {NULL, NULL, 0, NULL},
};
