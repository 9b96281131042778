/* What the tables of connections share, `Poller` and `Mailboxes`: finding a place, and dealing with
 * a connection, which is a `MessageTransport`.
 */

#ifndef AIOPS_LINKS_H
#define AIOPS_LINKS_H

#include "answers.h"

#define MOST_TIME 1000000LL /* nanoseconds of one call of the event loop */

/* Return whether a value of a field is false; errors count as true. */
int lacks(PyObject *object, int which);

/* Call a method for its effect, with the arguments that are not NULL; -1: it has raised. */
int tell(PyObject *object, const char *method, PyObject *argument, PyObject *other);

/* Tell a connection of the error that is set: it ends, and the others go on. */
int broken(PyObject *link);

/* Return the compiled answers whose bound method this is; NULL: it is another's. */
PyObject *answers_of(PyObject *shortcut);

/* Return whether a connection takes pushes by these answers now. */
int takes_by(PyObject *link, PyObject *shortcut, const Answers *answers);

/* Find where in the head buffer the next push begins, and what of it has come ends, if no other
 * message is under way. */
int find_push(PyObject *wire, long long *begin, long long *end);

/* Find a free place in a table, whose items begin with their connection, or NULL where there is none.
 * It grows to `most` places; 0: it cannot, and an error is set. */
int find_place(void **table, uint32_t *places, size_t size, uint32_t most, uint32_t *place);

#endif
