/* A mailbox: memory in which the two sides of one connection exchange pushes and answers.
 *
 * Each word has one writer, but `POSTED_AT`: the client posts a message there, and takes it back if
 * the server has not taken it; both by compare and exchange. A word is a message's number, from 1 on,
 * above two bits of what has become of it. Neither side believes the other's words: it compares them
 * with the ones that it expects now, and all else is as if nothing were there. No byte of the memory
 * is a length or an offset, but for those of a place, which Python checks at the client. The server
 * copies the header of a push out of it before it looks at it, and the payload, if it is a small one,
 * coded, or recorded; otherwise that is numbers alone, and they are read where they lie.
 */

#ifndef AIOPS_MAILBOX_H
#define AIOPS_MAILBOX_H

#include "core.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#define HAS_MAILBOXES 1
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Words, each in cache lines of its own. */
#define POSTED_AT 0          /* by both: the push */
#define ANSWERED_AT 128      /* by the server, and a futex of the client: its answer */
#define CLIENT_SLEEPS_AT 256 /* by the client: it waits for the futex */
#define SERVER_SLEEPS_AT 384 /* by the server: it is to be woken by the bell */
#define OPEN_AT 512          /* by the server: pushes may be posted */
#define RETURNED_AT 640      /* by the client: the answers up to this number are given back */
#define PLACE_AT 768         /* by the server: a segment and an offset, of what it has lent */

/* Headers, and payloads at pages of their own. */
#define PAGE 4096
#define PUSH_AT PAGE
#define ANSWER_AT (2 * PAGE)
#define PAYLOAD_AT (3 * PAGE)

enum { POSTED = 1, TAKEN, WITHDRAWN }; /* of the word at POSTED_AT */
enum { HERE = 1, ELSEWHERE, LENT };    /* of the word at ANSWERED_AT: by the socket, at a place */

typedef _Atomic uint32_t Word;

static inline Py_ssize_t in_pages(Py_ssize_t nbytes)
{
    return (nbytes + PAGE - 1) / PAGE * PAGE;
}

static inline Py_ssize_t mailbox_size(Py_ssize_t nbytes)
{
    return PAYLOAD_AT + 2 * in_pages(nbytes);
}

static inline Word *word(const Py_buffer *memory, Py_ssize_t at)
{
    return (Word *)((char *)memory->buf + at);
}

/* The word for a message. */
static inline uint32_t worded(uint32_t number, uint32_t state)
{
    return number << 2 | state;
}

/* Wait until a word is another than `value`, it is woken, or these nanoseconds have passed; as `futex`. */
static inline long wait_for(Word *at, uint32_t value, long nanoseconds)
{
    struct timespec most = {.tv_sec = 0, .tv_nsec = nanoseconds};
    return syscall(SYS_futex, at, FUTEX_WAIT, value, &most, NULL, 0);
}

static inline void wake(Word *at)
{
    syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Return whether memory may be a mailbox. */
static inline int is_mailbox(const Py_buffer *memory, Py_ssize_t nbytes, Py_ssize_t push,
                             Py_ssize_t answer)
{
    return (uintptr_t)memory->buf % PAGE == 0 && push <= PAGE && answer <= PAGE && nbytes > 0 &&
           nbytes <= LARGEST && memory->len == mailbox_size(nbytes);
}

#endif
#endif
