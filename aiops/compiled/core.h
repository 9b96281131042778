/* What the files of `_core` share: Python's limited API, and the types that each file makes. */

#ifndef AIOPS_CORE_H
#define AIOPS_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* Python 3.11: the first with Py_buffer in it */
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores the signal of a lost connection, as a rule */
#endif

#define LARGEST ((1LL << 53) - 1) /* aiops.model.parts.LARGEST */

/* Each adds its types to the module; -1 with an error set. */
int add_exchange(PyObject *module);
int add_fields(PyObject *module);
int add_answers(PyObject *module);
int add_poller(PyObject *module);
int add_mailboxes(PyObject *module);
int add_kernel(PyObject *module);
int add_crc(PyObject *module);
int add_increments(PyObject *module);

/* Of `Exchange`: METH_FASTCALL, see _core.pyi. */
PyObject *run(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *carry(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *push(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *pull(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *push_usual(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *pull_usual(PyObject *self, PyObject *const *given, Py_ssize_t count);

/* Names that are looked up in each exchange: they are made once. */
#define NAMES(X)                                                                                  \
    X(ack) X(begin) X(borrow) X(constants) X(covers) X(direct) X(exchanged) X(freeze)                       \
    X(get_write_buffer_size) X(is_closing) X(note) X(number) X(pass_half) X(popitem) X(push)         \
    X(whole) X(write)
#define NAMED(name) NAME_##name,
enum { NAMES(NAMED) NAME_COUNT };
#undef NAMED
extern PyObject *names[NAME_COUNT];

/* The time in nanoseconds, which only goes on. */
long long now(void);

/* Big endian, as MessagePack writes numbers. */
static inline void write_number(char *at, uint64_t number)
{
    for (int byte = 7; byte >= 0; byte--, number >>= 8)
        at[byte] = (char)number;
}

static inline uint64_t read_number(const unsigned char *at, Py_ssize_t width)
{
    uint64_t number = 0;
    for (Py_ssize_t byte = 0; byte < width; byte++)
        number = number << 8 | at[byte];
    return number;
}

#endif
