/* Where words begin in a text, as GPT-2's pattern splits it: bits that bpe.c goes through. */
#include "core.h"

enum { UNKNOWN, BLANK, LETTER, DIGIT, OTHER };

typedef struct { /* a bit for each of 64 bytes */
    uint64_t letters, digits, blanks, spaces, others; /* others: beyond ASCII */
} Kinds;

#if defined(__SSE2__) && !defined(MILLRACE_PORTABLE) /* make sanitize runs the other */
#include <emmintrin.h>

/* Of 16 bytes of ASCII, those from ``low`` to ``high``. */
static __m128i among(__m128i bytes, char low, char high) {
    return _mm_and_si128(_mm_cmpgt_epi8(bytes, _mm_set1_epi8((char)(low - 1))), _mm_cmplt_epi8(bytes, _mm_set1_epi8((char)(high + 1))));
}

static uint64_t bits(__m128i bytes) { return (uint64_t)(unsigned)_mm_movemask_epi8(bytes); }

static Kinds kinds_of(const unsigned char *text) {
    Kinds kinds = {0, 0, 0, 0, 0};
    for (int k = 0; k < 64; k += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(text + k)), space = among(bytes, ' ', ' ');
        kinds.letters |= bits(among(_mm_or_si128(bytes, _mm_set1_epi8(32)), 'a', 'z')) << k;
        kinds.digits |= bits(among(bytes, '0', '9')) << k;
        kinds.blanks |= bits(_mm_or_si128(among(bytes, '\t', '\r'), space)) << k;
        kinds.spaces |= bits(space) << k;
        kinds.others |= bits(bytes) << k;
    }
    return kinds;
}
#else
static const uint64_t ONES = 0x0101010101010101u, HIGH = 0x8080808080808080u;

/* Of eight bytes of ASCII, those from ``low`` to ``high``, by their highest bits. */
static uint64_t among(uint64_t bytes, unsigned low, unsigned high) {
    return (bytes + ONES * (0x80 - low)) & ~(bytes + ONES * (0x7F - high)) & HIGH;
}

/* The highest bits of eight bytes, together. */
static uint64_t bits(uint64_t bytes) { return (bytes >> 7) * 0x0102040810204080u >> 56; }

static Kinds kinds_of(const unsigned char *text) {
    Kinds kinds = {0, 0, 0, 0, 0};
    for (int k = 0; k < 64; k += 8) {
        uint64_t bytes, space;
        memcpy(&bytes, text + k, 8);
        if (bytes & HIGH) return (Kinds){0, 0, 0, 0, 1};
        space = among(bytes, ' ', ' ');
        kinds.letters |= bits(among(bytes | ONES * 32, 'a', 'z')) << k;
        kinds.digits |= bits(among(bytes, '0', '9')) << k;
        kinds.blanks |= bits(among(bytes, '\t', '\r') | space) << k;
        kinds.spaces |= bits(space) << k;
    }
    return kinds;
}
#endif

/* The character at ``at`` of utf-8 and its size; one that is none has no kind. */
static unsigned kind_at(const unsigned char *kinds, const unsigned char *at, int *size) {
    unsigned first = at[0], point = first;
    *size = first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (*size > 1) point = first & (0x7Fu >> *size);
    for (int k = 1; k < *size; k++) {
        if ((at[k] & 0xC0) != 0x80) return UNKNOWN;
        point = point << 6 | (at[k] & 0x3Fu);
    }
    return point >= NUM_KINDS || (first & 0xC0) == 0x80 ? UNKNOWN : kinds[point];
}

void core_begin(uint64_t *starts, int64_t at) { starts[at / 64] |= (uint64_t)1 << at % 64; }

typedef struct { /* of the character before */
    int64_t at;
    unsigned kind;
} Last;

/* Marks where words begin in 64 bytes of ASCII. A word is a run of letters, of digits or of others, with the space before
   it; white space leaves its last character to what follows. */
static Last mark_ascii(const unsigned char *text, const Kinds *now, int64_t block, Last last, uint64_t *starts) {
    uint64_t letters = now->letters << 1 | (last.kind == LETTER), digits = now->digits << 1 | (last.kind == DIGIT);
    uint64_t blanks = now->blanks << 1 | (last.kind == BLANK), spaces = now->spaces << 1 | (last.at >= 0 && text[last.at] == ' ');
    uint64_t is_other = ~(now->letters | now->digits | now->blanks), was_other = ~(letters | digits | blanks);
    uint64_t goes_on = (now->letters & letters) | (now->digits & digits) | (is_other & was_other) | spaces;
    uint64_t is_after = blanks & ~now->blanks; /* white space */
    starts[block] = (now->blanks & ~blanks) | (~now->blanks & ~goes_on) | is_after >> 1;
    if (is_after & 1 && last.at >= 0) core_begin(starts, last.at);
    unsigned kind = now->letters >> 63 ? LETTER : now->digits >> 63 ? DIGIT : now->blanks >> 63 ? BLANK : OTHER;
    return (Last){64 * block + 63, kind};
}

/* The same of any text from ``at`` to ``stop``, character by character; where the next begins, -1 where the kind of one is
   not known. */
static int64_t mark_any(const unsigned char *text, int64_t at, int64_t stop, const unsigned char *kinds, Last *last, uint64_t *starts) {
    int bytes;
    for (unsigned kind; at < stop; *last = (Last){at, kind}, at += bytes) {
        if ((kind = kind_at(kinds, text + at, &bytes)) == UNKNOWN) return -1;
        if (kind == last->kind) continue;
        if (last->kind == BLANK && last->at >= 0) core_begin(starts, last->at);
        if (last->kind != BLANK || last->at < 0 || text[last->at] != ' ') core_begin(starts, at);
    }
    return at;
}

/* A bit for each byte of a text, set where a word begins; -1 where that needs the kind of a character that is not known. */
int core_mark(const unsigned char *text, int64_t size, const unsigned char *kinds, uint64_t *starts) {
    Last last = {-1, BLANK}; /* as if a newline came first */
    int64_t next = 0;        /* where the next character begins */
    for (int64_t block = 0, stop = 64; 64 * block < size; block++, stop += 64) {
        Kinds now = kinds_of(text + 64 * block);
        if (now.others == 0) {
            last = mark_ascii(text, &now, block, last, starts);
            next = stop;
            continue;
        }
        starts[block] = 0;
        if (kinds == NULL || (next = mark_any(text, next, stop < size ? stop : size, kinds, &last, starts)) < 0) return -1;
    }
    return 0;
}

/* Bytes of 's 't 'm 'd 'll 've 're, which are words where one begins with them; 0 where it does not. */
int core_contraction(const unsigned char *at) {
    unsigned char a = at[1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'l' && at[2] == 'l') || ((a == 'v' || a == 'r') && at[2] == 'e') ? 3 : 0;
}
