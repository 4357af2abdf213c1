/* Shared by the files of the C core. Limited API from 3.11: one wheel serves every later Python. */
#ifndef MILLRACE_CORE_H
#define MILLRACE_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef _WIN32
#include <process.h>
#else
#include <unistd.h>
#endif

/* module.c */
int core_add_type(PyObject *module, const char *name, size_t size, PyType_Slot *slots, PyTypeObject **kept);
void core_free(PyObject *object); /* frees an object of a heap type */
/* PyEval_SaveThread and PyEval_RestoreThread, which count how long this thread waits: for the GIL, and to let go of it until
 * the thread that asked for it has it. */
PyThreadState *core_save(void);
void core_restore(PyThreadState *state);
#define CORE_BEGIN_ALLOW_THREADS                                                                                                 \
    {                                                                                                                            \
        PyThreadState *_save = core_save();
#define CORE_END_ALLOW_THREADS                                                                                                   \
    core_restore(_save);                                                                                                         \
    }
/* Zeros that are reached at random: in large pages where the system has them, since finding small ones takes its time. */
void *core_table(size_t size);
/* Whether a buffer may be read as numbers of so many bytes, or an exception says that it lies askew. */
int core_is_aligned(const Py_buffer *buffer, size_t bytes);
/* Borrows int64 numbers of a contiguous buffer; *count is how many. NULL with an exception. */
const int64_t *core_int64s(PyObject *object, Py_buffer *buffer, int64_t *count);
/* A copy of them, for what is checked once and used ever after; free() it. */
int64_t *core_copied_int64s(PyObject *object, int64_t *count);
/* Raises a class of millrace.errors by its name. */
PyObject *core_raise(const char *kind, const char *format, ...);
/* Whether the exception that is raised now is about data, files or memory, and not Ctrl-C. */
int core_is_expected(void);
void core_keep_error(PyObject **place); /* takes it away, for later */
PyObject *core_raise_kept(PyObject **place);

/* map.c: Map, a read-only memory map that keeps no file descriptor. */
int core_add_map(PyObject *module);

/* permute.c: the keyed permutation of [0, n). */
#define MAX_ROUNDS 24

typedef struct {
    uint64_t n, a, b; /* a x b >= n is the rectangle that is walked */
    int rounds;
} Sides;

Sides core_sides(uint64_t n);
void core_round_keys(uint64_t seed, uint64_t lane, uint64_t stream, int rounds, uint32_t *keys);
/* Moves values of [0, n) in place; all by the same keys. */
void core_permute(const Sides *sides, const uint32_t *keys, uint64_t *values, size_t count, int is_backward);
/* Each value by the sides and the column of keys of its own place; those of most rounds first, EACH at most. */
#define EACH 128
void core_permute_each(const Sides *const *sides, uint32_t (*keys)[EACH], uint64_t *values, int count);
extern PyMethodDef core_permute_functions[];

/* column.c: where the rows of a column lie. */
typedef struct {
    PyObject_HEAD
    int64_t num_shards, num_rows, row_bytes;
    int64_t *starts;        /* the first row of each shard, and the end */
    const char **addresses; /* of each shard, NULL until it is given */
    Py_buffer *shards;
    int *files; /* of each shard, by which cold rows are read past the page cache, -1 for none; the column closes them */
} Column;

extern PyTypeObject *Column_Type;
const char *core_shard(const Column *column, int64_t shard);
int core_file(const Column *column, int64_t shard);
int64_t core_shard_of(const Column *column, int64_t row);
int core_add_column(PyObject *module);

/* gather.c: spans -> filled buffers. */
#define MAX_AXES 16
#define MAX_FIELDS 64
#define READS_NOTHING(kind) ((kind) >= LENGTHS)

/* LENGTHS: how many rows the span has, at most `first`; MASK: a byte for each of `length` rows, 1 where the span has it;
 * START: the first row of the span, plus `first`. These three read nothing. A RAGGED sample that ends at row `first` of its
 * column or before has no rows: they are held elsewhere. */
enum { DENSE, RAGGED, PADDED, RECORD, LENGTHS, MASK, START };
enum { COPY, FROM_I8, FROM_U8, FROM_I16, FROM_U16, FROM_I32, FROM_U32, FROM_F16, FROM_BF16 };
enum { FINE, MISSING, OUTSIDE, SHORT, BEYOND, SPACE, PASSED, TOO_LARGE, REFUSED };

typedef struct { /* one entry of a batch */
    Column *column;
    int number, kind, axis, cast;      /* number: of the column, among those of its Gather */
    int64_t first, length;             /* rows of the sample's span; rows of padding */
    int64_t row_items, group, num_groups; /* items of a stored row; of its last axis; how many of those there are */
    int64_t *items, num_items;            /* which of the last axis, NULL for all */
    int is_run;                           /* the items are neighbours */
    int64_t item_bytes, out_item_bytes, out_row_bytes; /* stored; delivered */
    char fill[32];                                     /* of PADDED: each delivered number behind the rows, if not zero */
    int64_t fill_bytes;                                /* of it; 0 for zeros */
    char name[64];
} Field;

typedef struct { /* the pieces of samples on one axis; without offsets one each */
    const int64_t *starts, *stops, *offsets;
} Pieces;

typedef struct { /* what went wrong, where, with its numbers */
    int code;
    const Field *field;
    int64_t a, b, c;
} Problem;

#define FETCHED_PARTS 16

typedef struct { /* rows [start, stop) of a column, which lie elsewhere than in its shards */
    const Column *column;
    int64_t start, stop;
    const char *rows;
} FetchedPart;

typedef struct { /* of one sample */
    int count;
    FetchedPart parts[FETCHED_PARTS];
} Fetched;

/* The bytes of so many rows of a field in all its samples; -1 where they pass 2^63 - 1. */
int64_t core_out_bytes(const Field *field, int64_t samples, int64_t rows);
int64_t core_piece_rows(const Pieces *pieces, int64_t i);
/* Copies sample i of a field, which has room for so many rows; `fetched` may be NULL. */
int core_gather(const Field *field, const Pieces *axes, const int64_t *records, int64_t i, int64_t room, char *to,
                const Fetched *fetched, Problem *problem);
PyObject *core_raise_problem(const Problem *problem);

/* ahead.c: whether data is cold, and what was asked for. */
typedef struct {
    int is_cold, is_begun, fast, patience; /* fast: probes in a row that did not wait for the disk; patience: until it is hot */
    int64_t asked, done;                   /* batches up to these are being asked for, and were */
    int64_t faults, samples, batch_bytes;  /* counted while it is hot; of the batch asked for last */
} Ahead;

/* gather_object.c: the fields of a view as an object. */
typedef struct {
    PyObject_HEAD
    PyObject *columns; /* a tuple of Column */
    Field *fields;
    int num_fields;
    Ahead ahead;
} Gather;

extern PyTypeObject *Gather_Type;
PyObject *core_gather_fill(PyObject *gather, PyObject *args); /* fill.c */
int core_add_gather(PyObject *module);

/* order.c: position -> sample. */
enum { SEQUENTIAL, SHUFFLED, BLOCK_SHUFFLED, MIXTURE };

typedef struct {
    int kind, has_blocks;
    uint64_t n, seed, block, window;
    Sides all, blocks, full, rest; /* of samples, of full blocks, of the places of a full window and of the last one */
    PyObject *mixture;             /* a Mixture, borrowed from the plan; NULL for other orders */
} Order;

int core_order_init(Order *order, PyObject *plan);
extern PyMethodDef core_order_functions[];
void core_order(const Order *order, const int64_t *positions, int64_t count, int64_t *samples);

/* mixture.c: the turns of several sources. */
int core_is_mixture(PyObject *object);
void core_mixture(const PyObject *mixture, uint64_t seed, const int64_t *positions, int64_t count, int64_t *samples);
int core_add_mixture(PyObject *module);
extern PyMethodDef core_mixture_functions[];

/* program.c: the steps of a plan, and a whole batch by them. */
#define ALIGN 256 /* of what lies in a slot: enough for every device */

enum { NEVER, COLD, ALWAYS };
enum { TAKE, SELECT, CONCAT, STRIDE, LOCATE, OFFSETS, PIECES, RANKED };
#define BLOCK_WORDS 16 /* of a bitmap, for each of its ranks: 1,024 bits */
#define RANK_RECORDS 64 /* of windows, for each of their ranks, as in view/windows.py: their offsets are eight lines of memory */

typedef struct {
    int kind, next, part, num_axes;
    int64_t count, stride, rows; /* rows: of a bitmap, how many blocks it has */
    const int64_t *numbers[MAX_AXES];
    int64_t *own[2]; /* of concat: copies, since they are indices that were checked */
    /* Of offsets that lie in several shards: those of each axis and piece, from 0 on; numbers has the rows before each piece,
     * and own[0] the first record of each and the last one's end. */
    const int64_t **pieces;
    int64_t num_pieces;
} Step;

typedef struct {
    PyObject_HEAD
    Order order;
    int64_t start, stop, batch, begin; /* stop is -1 where the line is endless */
    int64_t size, group; /* samples that are made at a time, and of how many batches they are */
    Step *steps;
    int num_steps, num_parts, num_axes, num_fields, num_held;
    Gather **gathers;
    Py_buffer *held;
    PyObject *parts, *find_shard;
    int64_t marks[3], places[MAX_FIELDS], fixed_bytes;
    int64_t most;  /* the last batch that positions allow */
    int fetches;   /* NEVER, or from the files of its columns: COLD rows, or ALWAYS */
    Ahead ahead;
} Program;

typedef struct Fetch Fetch; /* fetch.c */

typedef struct { /* of one thread, while it makes samples [first, last) of a batch */
    int64_t batch, first, last; /* what was found; none where batch is -1 */
    int64_t *positions, *samples, *records, *starts, *stops;
    int32_t *parts;
    char *valid;
    Ahead *ahead; /* the program's */
    Fetch *fetch; /* made when it is first needed */
    int may_fetch;
    int64_t num_fetched; /* samples */
    PyObject *stop;      /* an exception that is not about the data, as Ctrl-C in a call to Python */
} Work;

extern PyTypeObject *Program_Type;
/* steps.c */
int core_step_init(Program *program, Step *step, PyObject *plan);
int core_steps_check(const Program *program);
Work *core_work_new(Program *program, int may_fetch); /* may_fetch: it makes many batches */
void core_work_free(Work *work);
/* shards.c. Of a batch that was found: the rows a field reads of sample i, none where they are wrong; whether shards are missing. */
void core_rows_of(const Program *program, const Field *field, const Work *work, int64_t i, int64_t *start, int64_t *stop);
/* The span that holds what all fields of field f's column read of sample i; 0 where that is nothing, or an earlier field's. */
int core_column_rows(const Program *program, const Work *work, int64_t i, int f, int64_t *start, int64_t *stop);
int core_has_missing(const Program *program, const Work *work);
/* Asks Python for all of them; needs the GIL. 0, or -1 with an exception. */
int core_give_missing(const Program *program, const Work *work);
/* The samples [first, last) of a batch and their spans, unless the work area has them. */
int core_find(const Program *program, int64_t batch, int64_t first, int64_t last, Work *work, Problem *problem);

typedef struct { /* of a batch in a slot */
    int64_t used, values_at[MAX_FIELDS]; /* its bytes; where the values of ragged fields lie */
} Measure;

/* Measures a batch and writes where its ragged samples begin. SPACE where the memory is too small, with its bytes. */
int core_measure(const Program *program, int64_t batch, char *memory, int64_t capacity, Measure *measure, Work *work,
                 Problem *problem);
/* Makes samples [first, last) of a batch that was measured; needs no GIL. MISSING can be mended and tried again. */
int core_make(const Program *program, int64_t batch, int64_t first, int64_t last, char *memory, const Measure *measure,
              Work *work, Problem *problem);
int core_add_program(PyObject *module);

/* pack.c: documents put into blocks. */
extern PyMethodDef core_pack_functions[];

/* table.c: rows of tables turned, measured and scaled. */
extern PyMethodDef core_table_functions[];

/* images.c: boxes of images scaled and normalised. */
extern PyMethodDef core_images_functions[];

/* documents.c: a chunk of documents. */
typedef struct {
    Py_buffer text, start, stop;
    const int64_t *starts, *stops;
    int64_t count, longest;
} Documents;

int core_documents_init(Documents *documents, PyObject *given);
void core_document(const Documents *documents, int64_t k, const char **text, int64_t *size);
void core_documents_free(Documents *documents);

/* xxh3.c: hashes of documents. */
extern PyMethodDef core_hashes_functions[];

/* text.c: where documents begin and end in a text. */
extern PyMethodDef core_text_functions[];

/* clean.c: documents cleaned. */
#define NUM_PLAIN 0x20000 /* code points that a table speaks of */

extern PyMethodDef core_clean_functions[];

/* tokens.c: sizes of documents, and runs of values copied. */
extern PyMethodDef core_tokens_functions[];

/* words.c: a bit for each byte of a text, set where a word begins. The text is padded by newlines. */
#define NUM_KINDS 0x110000 /* code points, each of a kind: 0 unknown, 1 white space, 2 letter, 3 number, 4 other */

int core_mark(const unsigned char *text, int64_t size, const unsigned char *kinds, uint64_t *starts);
void core_begin(uint64_t *starts, int64_t at);
int core_contraction(const unsigned char *at);

/* bpe.c: documents and their ids. */
int core_add_bpe(PyObject *module);

/* repeats.c: a set of hashes. */
int core_add_repeats(PyObject *module);

#endif
