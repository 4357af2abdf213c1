/* Shared by the files of the C core. Limited API from 3.11: one wheel serves every later Python. */
#ifndef MILLRACE_CORE_H
#define MILLRACE_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* map.c: Map, a read-only memory map that keeps no file descriptor. */
int core_add_map(PyObject *module);

/* table.c: rows of tables turned, measured and scaled. */
int core_add_table(PyObject *module);

#endif
