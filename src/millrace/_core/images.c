/* A box of an image, scaled to another size, turned over and normalised: bilinear with support that grows where it shrinks,
 * as Pillow's BILINEAR with box=. First down the columns, which are neighbours in memory, then along the row. All sums are
 * float32 in the order of the taps, so that numpy gives the same bytes. */
#include "core.h"

#include <math.h>
#include <stdlib.h>

#define CHANNELS 3
#define MOST_PIXELS ((int64_t)1 << 31) /* along a side */

/* Wider registers where the processor has them; no fused operations, which would round once where numpy rounds twice. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

typedef float Pixel __attribute__((vector_size(16), aligned(4), may_alias)); /* and what follows it */

typedef struct { /* which pixels of a line make each pixel of the result, and their weights: as many for all, some of them 0 */
    int64_t count, taps;
    int64_t *first;
    float *weights;
} Taps;

static void taps_free(Taps *taps) {
    free(taps->first);
    free(taps->weights);
}

typedef struct { /* the part [start, ...) of a line of `size` pixels, of which a pixel of the result covers `step` */
    int64_t size;
    double start, step, width;
} Line;

/* Which pixels [*first, *last) count for pixel i of the result; returns where its centre is. */
static double covered(const Line *line, int64_t i, int64_t *first, int64_t *last) {
    double centre = line->start + ((double)i + 0.5) * line->step;
    double low = centre - line->width + 0.5, high = centre + line->width + 0.5;
    *first = low > 0 ? (int64_t)low : 0;
    *last = high < (double)line->size ? (int64_t)high : line->size;
    if (*first >= *last) *first = *last - 1; /* rounding at the very end of a line */
    return centre;
}

/* Of a line of `size` pixels, the part [start, start + length) becomes `count` pixels. 0, or -1 without memory. */
static int taps_init(Taps *taps, int64_t size, double start, double length, int64_t count, int is_flipped) {
    Line line = {.size = size, .start = start, .step = length / (double)count};
    line.width = line.step > 1 ? line.step : 1;
    int64_t first, last, numbers;
    taps->count = count;
    taps->taps = 1;
    for (int64_t i = 0; i < count; i++) {
        covered(&line, i, &first, &last);
        if (last - first > taps->taps) taps->taps = last - first;
    }
    if (__builtin_mul_overflow(count, taps->taps, &numbers) || numbers > (int64_t)1 << 40) return -1;
    taps->first = malloc((size_t)count * sizeof *taps->first);
    taps->weights = calloc((size_t)numbers, sizeof *taps->weights);
    if (taps->first == NULL || taps->weights == NULL) return -1;
    for (int64_t i = 0; i < count; i++) {
        double centre = covered(&line, i, &first, &last), sum = 0;
        int64_t at = is_flipped ? count - 1 - i : i, begin = first < size - taps->taps ? first : size - taps->taps;
        float *weights = taps->weights + at * taps->taps;
        taps->first[at] = begin;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t k = first; k < last; k++) {
                double far = fabs(((double)k - centre + 0.5) / line.width), weight = far < 1 ? 1 - far : 0;
                if (pass == 0) sum += weight;
                else weights[k - begin] = (float)(weight / sum);
            }
    }
    return 0;
}

/* One row of the result, before it is scaled along the row: `count` numbers of the rows from `from` on. */
WIDE static void sum_rows(const uint8_t *restrict from, int64_t stride, const float *restrict weights, int64_t taps,
                          float *restrict row, int64_t count) {
    for (int64_t x = 0; x < count; x++) row[x] = weights[0] * (float)from[x];
    for (int64_t k = 1; k < taps; k++) {
        const uint8_t *restrict line = from + k * stride;
        float weight = weights[k];
        if (weight == 0) continue;
        for (int64_t x = 0; x < count; x++) row[x] += weight * (float)line[x];
    }
}

static inline __attribute__((always_inline)) void sum_taps(const float *row, int64_t begin, const Taps *taps, int64_t num_taps,
                                                           Pixel *restrict sums) {
    const float *weights = taps->weights;
    for (int64_t x = 0; x < taps->count; x++, weights += num_taps) {
        const float *from = row + (taps->first[x] - begin) * CHANNELS;
        Pixel sum = *(const Pixel *)from * weights[0];
        for (int64_t k = 1; k < num_taps; k++) sum += *(const Pixel *)(from + k * CHANNELS) * weights[k];
        sums[x] = sum;
    }
}

/* One row of the result from numbers that begin at pixel `begin`; there is one number more than the pixels have. */
WIDE static void sum_pixels(const float *row, int64_t begin, const Taps *taps, Pixel *restrict sums) {
    switch (taps->taps) { /* the usual numbers as constants, without an inner loop */
    case 2: sum_taps(row, begin, taps, 2, sums); break;
    case 3: sum_taps(row, begin, taps, 3, sums); break;
    case 4: sum_taps(row, begin, taps, 4, sums); break;
    case 5: sum_taps(row, begin, taps, 5, sums); break;
    default: sum_taps(row, begin, taps, taps->taps, sums);
    }
}

typedef struct {
    char *out;
    int is_float, is_flipped;
    int64_t width, pixel, plane; /* steps from pixel to pixel and from channel to channel */
    float scale[CHANNELS], offset[CHANNELS];
} Target;

WIDE static void write_floats(const float *restrict sums, int64_t count, float scale, float offset, float *restrict out, int64_t step) {
    if (step == 1)
        for (int64_t x = 0; x < count; x++) out[x] = sums[x * 4] * scale + offset;
    else
        for (int64_t x = 0; x < count; x++) out[x * step] = sums[x * 4] * scale + offset;
}

static void write_bytes(const float *restrict sums, int64_t count, float scale, float offset, uint8_t *restrict out, int64_t step) {
    for (int64_t x = 0; x < count; x++) {
        float value = sums[x * 4] * scale + offset + 0.5f;
        out[x * step] = value >= 255.0f ? 255 : value > 0 ? (uint8_t)value : 0;
    }
}

static void write_row(const Pixel *sums, const Target *target, int64_t first) {
    for (int c = 0; c < CHANNELS; c++) {
        const float *from = (const float *)sums + c;
        int64_t at = first + c * target->plane;
        if (target->is_float)
            write_floats(from, target->width, target->scale[c], target->offset[c], (float *)target->out + at, target->pixel);
        else write_bytes(from, target->width, target->scale[c], target->offset[c], (uint8_t *)target->out + at, target->pixel);
    }
}

typedef struct {
    const uint8_t *pixels;
    int64_t height, width;
    double top, left, box_height, box_width;
} Source;

/* 0, or -1 without memory. */
static int resize(const Source *source, const Target *target, int64_t height) {
    Taps down = {.first = NULL}, along = {.first = NULL};
    float *row = NULL;
    Pixel *sums = NULL;
    int status = -1;
    if (taps_init(&down, source->height, source->top, source->box_height, height, 0) < 0) goto done;
    if (taps_init(&along, source->width, source->left, source->box_width, target->width, target->is_flipped) < 0) goto done;
    int64_t last = target->is_flipped ? 0 : along.count - 1; /* the pixel of the result that is made of the last ones */
    int64_t begin = along.first[along.count - 1 - last], end = along.first[last] + along.taps;
    int64_t count = (end - begin) * CHANNELS, stride = source->width * CHANNELS;
    row = malloc(((size_t)count + 1) * sizeof *row);
    sums = malloc((size_t)target->width * sizeof *sums);
    if (row == NULL || sums == NULL) goto done;
    row[count] = 0;
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *from = source->pixels + down.first[y] * stride + begin * CHANNELS;
        sum_rows(from, stride, down.weights + y * down.taps, down.taps, row, count);
        sum_pixels(row, begin, &along, sums);
        write_row(sums, target, y * target->width * target->pixel);
    }
    status = 0;
done:
    taps_free(&down);
    taps_free(&along);
    free(row);
    free(sums);
    return status;
}

static int image_of(PyObject *object, Py_buffer *buffer, int flags) {
    if (PyObject_GetBuffer(object, buffer, flags | PyBUF_FORMAT | PyBUF_ND) < 0) return -1;
    const char *format = buffer->format != NULL ? buffer->format : "B";
    if (*format == '<' || *format == '=') format++;
    int is_known = strcmp(format, "B") == 0 || ((flags & PyBUF_WRITABLE) && strcmp(format, "f") == 0);
    is_known = is_known && buffer->ndim == 3 && core_is_aligned(buffer, (size_t)buffer->itemsize);
    for (int k = 0; k < 3 && is_known; k++) is_known = buffer->shape[k] > 0 && buffer->shape[k] < MOST_PIXELS;
    if (is_known) return 0;
    PyBuffer_Release(buffer);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "resize_image needs pixels as uint8, and uint8 or float32 for the result, of three axes that are not empty");
    return -1;
}

static PyObject *resize_image(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given, *result;
    Source source;
    Target target;
    int is_planar, status = -1;
    float *s = target.scale, *o = target.offset;
    if (!PyArg_ParseTuple(args, "O(dddd)Opp((fff)(fff)):resize_image", &given, &source.top, &source.left, &source.box_height,
                          &source.box_width, &result, &is_planar, &target.is_flipped, s, s + 1, s + 2, o, o + 1, o + 2))
        return NULL;
    Py_buffer pixels, out;
    if (image_of(given, &pixels, 0) < 0) return NULL;
    if (image_of(result, &out, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&pixels);
        return NULL;
    }
    source.pixels = pixels.buf;
    source.height = pixels.shape[0];
    source.width = pixels.shape[1];
    int64_t height = out.shape[is_planar ? 1 : 0];
    target.out = out.buf;
    target.is_float = out.itemsize == sizeof(float);
    target.width = out.shape[is_planar ? 2 : 1];
    target.pixel = is_planar ? 1 : CHANNELS;
    target.plane = is_planar ? height * target.width : 1;
    int fits = pixels.shape[2] == CHANNELS && out.shape[is_planar ? 0 : 2] == CHANNELS;
    fits = fits && source.top >= 0 && source.left >= 0 && source.box_height > 0 && source.box_width > 0;
    fits = fits && source.top + source.box_height <= (double)source.height && source.left + source.box_width <= (double)source.width;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "resize_image needs images of three channels, and a box within the first");
        goto done;
    }
    CORE_BEGIN_ALLOW_THREADS
    status = resize(&source, &target, height);
    CORE_END_ALLOW_THREADS
    if (status < 0) PyErr_NoMemory();
done:
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef core_images_functions[] = {
    {"resize_image", resize_image, METH_VARARGS, "Scales a box of an image, turns it over and normalises it, into an array that is given."},
    {NULL, NULL, 0, NULL},
};
