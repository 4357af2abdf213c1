/* Rows of tables: columns turned into rows, measured and scaled. The sums run down each column row by row, as
 * numpy's do over the first axis, so that both give the same bytes. */
#include "core.h"

#include <math.h>

#define BLOCK 64 /* rows turned at once */
#define MOST_WIDE ((int64_t)1 << 40) /* columns: more than any memory holds, and few enough to count their bytes */

/* Wider registers where the processor has them; no fused operations, which would round once where numpy rounds twice. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

enum { F4 = 4, F8 = 8 };

typedef struct {
    Py_buffer buffer;
    int size; /* of an item: F4 or F8; 0 when there is no buffer */
} Floats;

static int floats_of(PyObject *object, Floats *floats, int flags) {
    if (PyObject_GetBuffer(object, &floats->buffer, flags | PyBUF_FORMAT | PyBUF_ND) < 0) return -1;
    const char *format = floats->buffer.format != NULL ? floats->buffer.format : "B";
    if (*format == '<' || *format == '=') format++;
    floats->size = *format == 'f' ? F4 : *format == 'd' ? F8 : 0;
    if (floats->size == 0 || format[1] != 0) {
        PyErr_Format(PyExc_TypeError, "expected float32 or float64, got format %s", floats->buffer.format);
        floats->size = 0;
    } else if (!core_is_aligned(&floats->buffer, (size_t)floats->size)) floats->size = 0;
    if (floats->size == 0) PyBuffer_Release(&floats->buffer);
    return floats->size == 0 ? -1 : 0;
}

static void release(Floats *floats, Py_ssize_t count) {
    for (Py_ssize_t k = 0; k < count; k++)
        if (floats[k].size) PyBuffer_Release(&floats[k].buffer);
}

/* The loops, once for each type of number. */
#define TURN(NAME, FROM, TO)                                                                                                     \
    static int NAME(const FROM *from, TO *to, Py_ssize_t rows, Py_ssize_t width) {                                               \
        TO sum = 0;                                                                                                              \
        for (Py_ssize_t i = 0; i < rows; i++) {                                                                                  \
            TO value = (TO)from[i];                                                                                              \
            to[i * width] = value;                                                                                               \
            sum += value - value; /* NaN where the value is NaN or infinite */                                                   \
        }                                                                                                                        \
        return sum == 0;                                                                                                         \
    }
TURN(turn_f4_f4, float, float)
TURN(turn_f4_f8, float, double)
TURN(turn_f8_f8, double, double)

static int turn(const Floats *columns, Py_ssize_t width, Py_ssize_t rows, const Floats *out) {
    int finite = 1;
    for (Py_ssize_t first = 0; first < rows; first += BLOCK) {
        Py_ssize_t count = rows - first < BLOCK ? rows - first : BLOCK;
        for (Py_ssize_t k = 0; k < width; k++) {
            char *to = (char *)out->buffer.buf + (first * width + k) * out->size;
            const char *from = (const char *)columns[k].buffer.buf + first * columns[k].size;
            if (out->size == F4) finite &= turn_f4_f4((const float *)from, (float *)to, count, width);
            else if (columns[k].size == F4) finite &= turn_f4_f8((const float *)from, (double *)to, count, width);
            else finite &= turn_f8_f8((const double *)from, (double *)to, count, width);
        }
    }
    return finite;
}

static PyObject *rows_of(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *list, *target;
    if (!PyArg_ParseTuple(args, "OO:rows_of", &list, &target)) return NULL;
    Py_ssize_t width = PySequence_Size(list);
    if (width < 0) return NULL;
    Floats out = {.size = 0}, *columns = PyMem_Calloc(width ? (size_t)width : 1, sizeof(Floats));
    if (columns == NULL) return PyErr_NoMemory();
    int finite = -1;
    if (floats_of(target, &out, PyBUF_WRITABLE) < 0) goto done;
    Py_ssize_t rows = width ? out.buffer.len / (width * out.size) : 0;
    for (Py_ssize_t k = 0; k < width; k++) {
        PyObject *column = PySequence_GetItem(list, k);
        int status = column == NULL ? -1 : floats_of(column, &columns[k], 0);
        Py_XDECREF(column);
        if (status < 0) goto done;
        if (columns[k].buffer.len != rows * columns[k].size || columns[k].size > out.size) {
            PyErr_SetString(PyExc_ValueError, "columns must be as long as the rows, and not wider");
            goto done;
        }
    }
    if (rows * width * out.size != out.buffer.len) {
        PyErr_SetString(PyExc_ValueError, "rows do not fill the target");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    finite = turn(columns, width, rows, &out);
    Py_END_ALLOW_THREADS
done:
    release(columns, width);
    release(&out, 1);
    PyMem_Free(columns);
    return finite < 0 ? NULL : PyBool_FromLong(finite);
}

/* Count, mean, what the mean lost, squares around it, smallest and largest value of each column. IS_KNOWN leaves out NaN. */
#define MEASURE(NAME, FROM, IS_KNOWN)                                                                                            \
    WIDE static void NAME(const FROM *restrict rows, Py_ssize_t count, Py_ssize_t width, double *restrict out) {                 \
        double *restrict mean = out + width, *restrict rest = out + 2 * width, *restrict m2 = out + 3 * width;                   \
        double *restrict low = out + 4 * width, *restrict high = out + 5 * width;                                                \
        for (Py_ssize_t k = 0; k < width; k++) {                                                                                 \
            out[k] = (double)count;                                                                                              \
            mean[k] = rest[k] = m2[k] = 0;                                                                                       \
            low[k] = INFINITY;                                                                                                   \
            high[k] = -INFINITY;                                                                                                 \
        }                                                                                                                        \
        for (Py_ssize_t i = 0; i < count; i++)                                                                                   \
            for (Py_ssize_t k = 0; k < width; k++) {                                                                             \
                double value = (double)rows[i * width + k];                                                                      \
                out[k] -= IS_KNOWN ? 0 : 1;                                                                                      \
                mean[k] += IS_KNOWN ? value : 0;                                                                                 \
                low[k] = value < low[k] ? value : low[k];                                                                        \
                high[k] = value > high[k] ? value : high[k];                                                                     \
            }                                                                                                                    \
        for (Py_ssize_t k = 0; k < width; k++) mean[k] /= out[k] > 0 ? out[k] : 1;                                               \
        for (Py_ssize_t i = 0; i < count; i++)                                                                                   \
            for (Py_ssize_t k = 0; k < width; k++) {                                                                             \
                double value = (double)rows[i * width + k], apart = IS_KNOWN ? value - mean[k] : 0;                              \
                rest[k] += apart;                                                                                                \
                m2[k] += apart * apart;                                                                                          \
            }                                                                                                                    \
        for (Py_ssize_t k = 0; k < width; k++) rest[k] /= out[k] > 0 ? out[k] : 1;                                               \
    }
MEASURE(measure_f4, float, 1)
MEASURE(measure_f8, double, 1)
MEASURE(measure_gaps_f4, float, (value == value))
MEASURE(measure_gaps_f8, double, (value == value))

static void measure_span(const char *rows, int size, Py_ssize_t count, Py_ssize_t width, double *out) {
    if (size == F4) measure_f4((const float *)rows, count, width, out);
    else measure_f8((const double *)rows, count, width, out);
    int has_gaps = 0; /* a sum over NaN is NaN */
    for (Py_ssize_t k = 0; k < width; k++) has_gaps |= out[width + k] != out[width + k];
    if (!has_gaps) return;
    if (size == F4) measure_gaps_f4((const float *)rows, count, width, out);
    else measure_gaps_f8((const double *)rows, count, width, out);
}

static PyObject *measure_rows(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *source, *target, *begin, *end, *result = NULL;
    Py_ssize_t width;
    if (!PyArg_ParseTuple(args, "OnOOO:measure_rows", &source, &width, &begin, &end, &target)) return NULL;
    Floats rows = {.size = 0}, out = {.size = 0};
    Py_buffer start_buffer = {.obj = NULL}, stop_buffer = {.obj = NULL};
    int64_t spans = 0, others = 0;
    const int64_t *starts = core_int64s(begin, &start_buffer, &spans), *stops = NULL;
    if (starts == NULL) return NULL;
    if ((stops = core_int64s(end, &stop_buffer, &others)) == NULL) goto done;
    if (floats_of(source, &rows, 0) < 0 || floats_of(target, &out, PyBUF_WRITABLE) < 0) goto done;
    int fits = width > 0 && width <= MOST_WIDE && spans == others && out.size == F8;
    int64_t count = fits ? rows.buffer.len / (width * rows.size) : 0, bytes;
    fits = fits && count * width * rows.size == rows.buffer.len;
    fits = fits && !__builtin_mul_overflow(spans, 6 * width * F8, &bytes) && out.buffer.len == bytes;
    for (int64_t k = 0; k < spans && fits; k++) fits = 0 <= starts[k] && starts[k] <= stops[k] && stops[k] <= count;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "measure_rows needs rows of the width, spans of them, and (spans, 6, width) float64 for the result");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t k = 0; k < spans; k++)
        measure_span((const char *)rows.buffer.buf + starts[k] * width * rows.size, rows.size, stops[k] - starts[k], width,
                     (double *)out.buffer.buf + k * 6 * width);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&rows, 1);
    release(&out, 1);
    PyBuffer_Release(&start_buffer);
    if (stops != NULL) PyBuffer_Release(&stop_buffer);
    return result;
}

#define SCALE(NAME, FROM)                                                                                                        \
    WIDE static int NAME(const FROM *restrict rows, Py_ssize_t count, Py_ssize_t width, const double *restrict center,           \
                         const double *restrict scale, float *restrict out) {                                                    \
        int fits = 1;                                                                                                            \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                                 \
            float sum = 0;                                                                                                       \
            for (Py_ssize_t k = 0; k < width; k++) {                                                                             \
                float value = (float)(((double)rows[i * width + k] - center[k]) / scale[k]);                                     \
                out[i * width + k] = value;                                                                                      \
                sum += value - value;                                                                                            \
            }                                                                                                                    \
            fits &= sum == 0;                                                                                                    \
        }                                                                                                                        \
        return fits;                                                                                                             \
    }
SCALE(scale_f4, float)
SCALE(scale_f8, double)

static PyObject *scale_rows(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given[4];
    Floats f[4] = {{.size = 0}, {.size = 0}, {.size = 0}, {.size = 0}}; /* rows, center, scale, out */
    if (!PyArg_ParseTuple(args, "OOOO:scale_rows", &given[0], &given[1], &given[2], &given[3])) return NULL;
    int fits = -1;
    for (int k = 0; k < 4; k++)
        if (floats_of(given[k], &f[k], k == 3 ? PyBUF_WRITABLE : 0) < 0) goto done;
    Py_ssize_t width = f[1].buffer.len / F8, count = width ? f[0].buffer.len / (width * f[0].size) : 0;
    if (f[1].size != F8 || f[2].size != F8 || f[3].size != F4 || f[2].buffer.len != f[1].buffer.len || width == 0 ||
        count * width * f[0].size != f[0].buffer.len || f[3].buffer.len != count * width * F4) {
        PyErr_SetString(PyExc_ValueError, "scale_rows needs rows, float64 center and scale of their width, and float32 rows for the result");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    const double *center = f[1].buffer.buf, *scale = f[2].buffer.buf;
    if (f[0].size == F4) fits = scale_f4(f[0].buffer.buf, count, width, center, scale, f[3].buffer.buf);
    else fits = scale_f8(f[0].buffer.buf, count, width, center, scale, f[3].buffer.buf);
    Py_END_ALLOW_THREADS
done:
    release(f, 4);
    return fits < 0 ? NULL : PyBool_FromLong(fits);
}

PyMethodDef core_table_functions[] = {
    {"rows_of", rows_of, METH_VARARGS, "Turns columns into rows; says whether all values are finite."},
    {"measure_rows", measure_rows, METH_VARARGS, "Count, mean, rest, squares, low and high of each column, of each span of rows; NaN left out."},
    {"scale_rows", scale_rows, METH_VARARGS, "(rows - center) / scale as float32; says whether all results are finite."},
    {NULL, NULL, 0, NULL},
};
