/* XXH3 with 128 bits of many documents, as the package xxhash gives it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md):
   one call for each of millions of short ones costs more than the hash. Little-endian machines only, as the store. */
#include "core.h"

static const unsigned char SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P1 = 0x9E3779B185EBCA87u, P2 = 0xC2B2AE3D27D4EB4Fu, P3 = 0x165667B19E3779F9u, P4 = 0x85EBCA77C2B2AE63u,
                      P5 = 0x27D4EB2F165667C5u, MIX_1 = 0x165667919E3779F9u, MIX_2 = 0x9FB21C651E98DF25u;

typedef struct {
    uint64_t low, high;
} Hash;

static uint64_t read64(const unsigned char *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static uint32_t read32(const unsigned char *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

/* Two words of the secret, as one. */
static uint64_t flip(int at) { return read64(SECRET + at) ^ read64(SECRET + at + 8); }

static uint64_t shifted(uint64_t value, int by) { return value ^ (value >> by); }

static Hash times(uint64_t a, uint64_t b) {
    unsigned __int128 found = (unsigned __int128)a * b;
    return (Hash){(uint64_t)found, (uint64_t)(found >> 64)};
}

static uint64_t folded(uint64_t a, uint64_t b) {
    Hash found = times(a, b);
    return found.low ^ found.high;
}

static uint64_t mixed(uint64_t value) { return shifted(shifted(value, 37) * MIX_1, 32); }

static uint64_t mixed64(uint64_t value) { return shifted(shifted(shifted(value, 33) * P2, 29) * P3, 32); }

static Hash up_to_3(const unsigned char *text, uint64_t size) {
    uint32_t low = (uint32_t)text[0] << 16 | (uint32_t)text[size >> 1] << 24 | text[size - 1] | (uint32_t)size << 8;
    uint32_t swapped = __builtin_bswap32(low), high = swapped << 13 | swapped >> 19;
    return (Hash){mixed64(low ^ (read32(SECRET) ^ read32(SECRET + 4))), mixed64(high ^ (read32(SECRET + 8) ^ read32(SECRET + 12)))};
}

static Hash up_to_8(const unsigned char *text, uint64_t size) {
    uint64_t both = read32(text) + ((uint64_t)read32(text + size - 4) << 32);
    Hash found = times(both ^ flip(16), P1 + (size << 2));
    found.high += found.low << 1;
    found.low ^= found.high >> 3;
    found.low = shifted(shifted(found.low, 35) * MIX_2, 28);
    found.high = mixed(found.high);
    return found;
}

static Hash up_to_16(const unsigned char *text, uint64_t size) {
    uint64_t low = read64(text), high = read64(text + size - 8);
    Hash found = times(low ^ high ^ flip(32), P1);
    found.low += (size - 1) << 54;
    high ^= flip(48);
    found.high += high + (uint32_t)high * (P32_2 - 1);
    found.low ^= __builtin_bswap64(found.high);
    Hash last = times(found.low, P2);
    last.high += found.high * P2;
    return (Hash){mixed(last.low), mixed(last.high)};
}

static uint64_t mix_16(const unsigned char *text, const unsigned char *secret) {
    return folded(read64(text) ^ read64(secret), read64(text + 8) ^ read64(secret + 8));
}

static void mix_32(Hash *sum, const unsigned char *a, const unsigned char *b, const unsigned char *secret) {
    sum->low = (sum->low + mix_16(a, secret)) ^ (read64(b) + read64(b + 8));
    sum->high = (sum->high + mix_16(b, secret + 16)) ^ (read64(a) + read64(a + 8));
}

static Hash closed(Hash sum, uint64_t size) {
    return (Hash){mixed(sum.low + sum.high), 0 - mixed(sum.low * P1 + sum.high * P4 + size * P2)};
}

static Hash up_to_128(const unsigned char *text, uint64_t size) {
    Hash sum = {size * P1, 0};
    for (int k = (int)(size - 1) / 32; k >= 0; k--) mix_32(&sum, text + 16 * k, text + size - 16 * (k + 1), SECRET + 32 * k);
    return closed(sum, size);
}

static Hash up_to_240(const unsigned char *text, uint64_t size) {
    Hash sum = {size * P1, 0};
    for (int k = 0; k < 4; k++) mix_32(&sum, text + 32 * k, text + 32 * k + 16, SECRET + 32 * k);
    sum = (Hash){mixed(sum.low), mixed(sum.high)};
    for (uint64_t at = 128; at + 32 <= size; at += 32) mix_32(&sum, text + at, text + at + 16, SECRET + 3 + (at - 128));
    mix_32(&sum, text + size - 16, text + size - 32, SECRET + 103);
    return closed(sum, size);
}

static void add_stripe(uint64_t *sums, const unsigned char *text, const unsigned char *secret) {
    for (int k = 0; k < 8; k++) {
        uint64_t value = read64(text + 8 * k), keyed = value ^ read64(secret + 8 * k);
        sums[k ^ 1] += value;
        sums[k] += (keyed & UINT32_MAX) * (keyed >> 32);
    }
}

static uint64_t merged(const uint64_t *sums, const unsigned char *secret, uint64_t start) {
    for (int k = 0; k < 8; k += 2) start += folded(sums[k] ^ read64(secret + 8 * k), sums[k + 1] ^ read64(secret + 8 * k + 8));
    return mixed(start);
}

static Hash of_any(const unsigned char *text, uint64_t size) {
    uint64_t sums[8] = {P32_3, P1, P2, P3, P4, P32_2, P5, P32_1}, stripes = (size - 1) / 64;
    for (uint64_t k = 0; k < stripes; k++) {
        add_stripe(sums, text + 64 * k, SECRET + 8 * (k % 16));
        if (k % 16 == 15)
            for (int j = 0; j < 8; j++) sums[j] = (shifted(sums[j], 47) ^ read64(SECRET + 128 + 8 * j)) * P32_1;
    }
    add_stripe(sums, text + size - 64, SECRET + 121);
    return (Hash){merged(sums, SECRET + 11, size * P1), merged(sums, SECRET + 117, ~(size * P2))};
}

static Hash hash_of(const unsigned char *text, uint64_t size) {
    if (size > 240) return of_any(text, size);
    if (size > 128) return up_to_240(text, size);
    if (size > 16) return up_to_128(text, size);
    if (size > 8) return up_to_16(text, size);
    if (size > 3) return up_to_8(text, size);
    return size > 0 ? up_to_3(text, size) : (Hash){mixed64(flip(64)), mixed64(flip(80))};
}

static PyObject *hash_documents(PyObject *module, PyObject *given) {
    (void)module;
    Documents documents;
    if (core_documents_init(&documents, given) < 0) return NULL;
    PyObject *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)documents.count * 16);
    uint64_t *to = found == NULL ? NULL : (uint64_t *)PyBytes_AsString(found);
    for (int64_t k = 0; k < documents.count && found != NULL; k++) {
        const char *text;
        int64_t size;
        core_document(&documents, k, &text, &size);
        Hash hash = hash_of((const unsigned char *)text, (uint64_t)size);
        to[2 * k] = __builtin_bswap64(hash.high); /* the highest byte first, as a digest is written */
        to[2 * k + 1] = __builtin_bswap64(hash.low);
    }
    core_documents_free(&documents);
    return found;
}

PyMethodDef core_hashes_functions[] = {
    {"hash_documents", hash_documents, METH_O, "The xxh3_128 digests of documents, one after the other."},
    {NULL, NULL, 0, NULL},
};
