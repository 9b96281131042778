/* Answers pushes that clients on this machine post in their mailboxes.
 *
 * One call of the event loop answers all that is posted, looks for more for a while, and then tells
 * the clients to ring before the loop sleeps. A push is copied to its connection's head buffer, as
 * if it had come there by the socket; from then on all is as with a push that has. What is no push
 * that is answered at once goes to the connection's `MessageTransport`, its answer goes by the
 * socket, and the call ends, as it does after a millisecond.
 *
 * Of a model of more than `SMALL` bytes a raw gradient is read where it lies, unless it is recorded,
 * and the parameters are lent: the client reads them in the server's memory, and says by a word when
 * they may change (`aiops.serving.peer.Peer`). One that says so too early harms itself alone.
 *
 * The client is not believed: a mailbox can change at any time. Only a word that says that the next
 * push is posted has any effect, and by taking it the server promises to write the answering word.
 */

#include "mailboxes.h"

#ifdef HAS_MAILBOXES

#include <sched.h>
#include <sys/epoll.h>

#define CROWDED 20000LL /* nanoseconds: a yield that takes as long finds no free processor */
#define LONGEST_REST 256
#define BATCH 64

/* Return where a push is to be copied: in the head buffer, if nothing else is under way, and its
 * connection is read from. */
static char *head_of(const Mailbox *box)
{
    PyObject *link = box->link, *wire = get(link, MessageTransport_wire);
    const Answers *answers = (const Answers *)box->answers;
    long long begin, end;
    if (!lacks(link, MessageTransport__unread) || !lacks(link, MessageTransport__received) ||
        !lacks(link, MessageTransport__closing) || !find_push(wire, &begin, &end) || begin != end ||
        begin > answers->head.len - answers->form.len - answers->region)
        return NULL;
    return (char *)answers->head.buf + begin;
}

#define SMALL (64 << 10) /* aiops.wire.connection.SMALL */
#define HALF (1U << 29)  /* of the numbers of pushes */

int pop_returned(Mailbox *box, long long *id)
{
    if (!box->lent_count)
        return 0;
    uint32_t returned = atomic_load(word(&box->memory, RETURNED_AT));
    const LentAnswer *oldest = &box->lent[0];
    if (returned == oldest->before ||
        ((returned - oldest->number) & (UINT32_MAX >> 2)) >= HALF)
        return 0;
    *id = oldest->id;
    memmove(box->lent, box->lent + 1, (MOST_LENT - 1) * sizeof *box->lent);
    box->lent_count--;
    return 1;
}

void release_answer(PyObject *lender, long long id)
{
    PyObject *said = PyObject_CallMethod(lender, "given_back", "L", id);
    if (said == NULL)
        PyErr_WriteUnraisable(lender);
    Py_XDECREF(said);
}

void take_returned(Mailboxes *self)
{
    long long id;
    for (uint32_t place = 0; place < self->places; place++) /* a call may have the table change */
        while (self->boxes[place].link != NULL && pop_returned(&self->boxes[place], &id)) {
            PyObject *lender = Py_NewRef(self->boxes[place].lender);
            release_answer(lender, id);
            Py_DECREF(lender);
        }
}

/* Leave the parameters for a client whose answer's header is there. Returns how: HERE, LENT or
 * ELSEWHERE; -1: an error is set. */
static int leave_parameters(Mailbox *box)
{
    const Answers *answers = (const Answers *)box->answers;
    char *memory = box->memory.buf;
    PyObject *place = box->lender == Py_None || box->lent_count == MOST_LENT
                          ? Py_NewRef(Py_None)
                          : PyObject_CallMethod(box->lender, "lend_current", "L", answers->id);
    unsigned long long found[2];
    int done = HERE;
    if (place == NULL)
        return -1;
    if (PyTuple_Check(place) && PyArg_ParseTuple(place, "KK", &found[0], &found[1])) {
        memcpy(memory + PLACE_AT, found, sizeof found);
        box->lent[box->lent_count++] =
            (LentAnswer){box->taken, atomic_load(word(&box->memory, RETURNED_AT)), answers->id};
        done = LENT;
    } else if (place == Py_False) { /* its client has to be told of a segment first */
        PyObject *whole = PyBytes_FromStringAndSize(NULL, answers->answer.len + answers->nbytes);
        char *to = whole == NULL ? NULL : PyBytes_AsString(whole);
        PyObject *all = NULL;
        done = -1;
        if (to != NULL && copy_parameters(answers, to + answers->answer.len) == 0) {
            memcpy(to, answers->header, (size_t)answers->answer.len);
            all = Py_BuildValue("[O]", whole);
        }
        if (all != NULL && tell(box->link, "send", all, NULL) == 0)
            done = ELSEWHERE;
        Py_XDECREF(all);
        Py_XDECREF(whole);
    } else if (PyErr_Occurred() ||
               copy_parameters(answers, memory + PAYLOAD_AT + in_pages(answers->nbytes)) < 0)
        done = -1;
    Py_DECREF(place);
    return done;
}

static int is_posted(const Mailbox *box)
{
    uint32_t next = (box->taken + 1) & (UINT32_MAX >> 2);
    return atomic_load(word(&box->memory, POSTED_AT)) == worded(next, POSTED);
}

/* Leave an answer in a mailbox that was made elsewhere; return whether it could. */
static int leave(const Mailbox *box, PyObject *said)
{
    const Answers *answers = (const Answers *)box->answers;
    Py_ssize_t size = answers->answer.len;
    Py_buffer view;
    if (PyObject_GetBuffer(said, &view, PyBUF_SIMPLE) < 0)
        return (PyErr_Clear(), 0);
    int whole = view.len == size + answers->nbytes;
    if (whole) {
        char *memory = box->memory.buf;
        memcpy(memory + ANSWER_AT, view.buf, (size_t)size);
        memcpy(memory + PAYLOAD_AT + in_pages(answers->nbytes), (char *)view.buf + size,
               (size_t)answers->nbytes);
    }
    PyBuffer_Release(&view);
    return whole;
}

/* Answer a push whose header is in the head buffer. Return HERE, ELSEWHERE or LENT, or -1. */
static int answer_taken(Mailboxes *self, Mailbox *box, int *general)
{
    Answers *answers = (Answers *)box->answers;
    PyObject *link = box->link;
    PyObject *received = PyLong_FromSsize_t(answers->form.len + answers->region);
    if (received == NULL) {
        answers->payload_from = NULL;
        return -1;
    }
    answers->fd = -1;
    answers->header_at = (char *)box->memory.buf + ANSWER_AT;
    answers->payload_at = answers->nbytes > SMALL
                              ? NULL
                              : (char *)box->memory.buf + PAYLOAD_AT + in_pages(answers->nbytes);
    PyObject *found = answer((PyObject *)answers, received);
    answers->header_at = NULL;
    if (found == Py_None)
        bring_payload(answers);
    answers->payload_from = NULL;
    int done = found == NULL ? -1 : ELSEWHERE;
    if (found == Py_None) {
        *general = 1;
        done = tell(link, "buffer_updated", received, Py_False) < 0 ? -1 : ELSEWHERE;
    } else if (found == Py_True || (found != NULL && PyObject_Size(found) > 0 && leave(box, found))) {
        self->served++;
        done = found == Py_True && answers->nbytes > SMALL ? leave_parameters(box) : HERE;
        if ((done == HERE || done == LENT) &&
            add(link, MessageTransport_pumped, answers->number_of[ANSWER_SIZE]) < 0)
            done = -1;
    } else if (found != NULL && PyObject_Size(found) > 0) { /* an answer of another form */
        PyObject *transport = get(link, MessageTransport_transport), *size;
        *general = 1;
        size = PyLong_FromSsize_t(PyObject_Size(found));
        done = add(link, MessageTransport_pumped, size) < 0 ||
                       tell(transport, "write", found, NULL) < 0
                   ? -1
                   : ELSEWHERE;
        Py_XDECREF(size);
    } else if (found != NULL)
        *general = 1; /* it waits for the journal */
    Py_XDECREF(found);
    Py_DECREF(received);
    return done;
}

/* Answer what is posted in a mailbox. 0: nothing is, or it waits; 1: it was answered there; 2: it
 * went the general way; -1 with an error. */
static int serve(Mailboxes *self, uint32_t place)
{
    Mailbox *known, box;
    if (!is_posted(&self->boxes[place]))
        return 0;
    take_returned(self);
    known = &self->boxes[place];
    if (known->link == NULL)
        return 0;
    if (!takes_by(known->link, known->shortcut, (const Answers *)known->answers)) {
        forget(self, known);
        return 0;
    }
    char *head = head_of(known);
    known->waits = head == NULL;
    if (head == NULL)
        return 0;
    uint32_t number = (known->taken + 1) & (UINT32_MAX >> 2), posted = worded(number, POSTED);
    if (!atomic_compare_exchange_strong(word(&known->memory, POSTED_AT), &posted,
                                        worded(number, TAKEN)))
        return 0; /* it was taken back */
    known->taken = number;
    box = *known; /* the table may change */
    Answers *answers = (Answers *)box.answers;
    const char *memory = box.memory.buf;
    memcpy(head, memory + PUSH_AT, (size_t)answers->form.len);
    answers->payload_from = memory + PAYLOAD_AT;
    answers->payload_to = head + answers->form.len;
    if (answers->nbytes <= SMALL || answers->piece_count)
        bring_payload(answers);
    PyObject *held[] = {Py_NewRef(box.link), Py_NewRef(box.answers), Py_NewRef(box.shortcut),
                        Py_NewRef(box.lender), Py_NewRef(box.memory.obj)};
    int general = 0, done = answer_taken(self, &box, &general);
    known = &self->boxes[place];
    if (done == LENT && known->memory.buf == box.memory.buf) {
        memcpy(known->lent, box.lent, sizeof box.lent);
        known->lent_count = box.lent_count;
    }
    atomic_store(word(&box.memory, ANSWERED_AT), worded(number, done < 0 ? ELSEWHERE : (uint32_t)done));
    if (atomic_load(word(&box.memory, CLIENT_SLEEPS_AT)))
        wake(word(&box.memory, ANSWERED_AT));
    done = done < 0 ? broken(box.link) < 0 ? -1 : 2 : general ? 2 : 1;
    for (size_t index = 0; index < sizeof held / sizeof *held; index++)
        Py_DECREF(held[index]);
    return done;
}

/* Tell clients whether to ring. */
static void have_rung(Mailboxes *self, int ring)
{
    take_returned(self);
    for (uint32_t place = 0; place < self->places; place++) {
        Mailbox *box = &self->boxes[place];
        if (box->link != NULL && box->told != ring) {
            atomic_store(word(&box->memory, SERVER_SLEEPS_AT), (uint32_t)ring);
            box->told = ring;
        }
    }
}

/* Return whether a push is there that can be taken. */
static int is_any_posted(const Mailboxes *self)
{
    for (uint32_t place = 0; place < self->places; place++) {
        const Mailbox *box = &self->boxes[place];
        if (box->link != NULL && !box->waits && is_posted(box))
            return 1;
    }
    return 0;
}

/* Look for the next push; return whether there is one. */
static int look(Mailboxes *self)
{
    if (self->resting) {
        self->resting--;
        return is_any_posted(self);
    }
    long long time = now(), until = time + (self->look ? self->look + self->longer : 0);
    while (!is_any_posted(self)) {
        long long before = time;
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
        time = now();
        if (time >= until || time - before >= CROWDED) {
            if (is_any_posted(self))
                break;
            self->resting = self->rest;
            self->rest = 2 * self->rest < LONGEST_REST ? 2 * self->rest : LONGEST_REST;
            return 0;
        }
    }
    self->rest = 1;
    return 1;
}

PyObject *answer_posted(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Mailboxes *self = (Mailboxes *)object;
    struct epoll_event rung[BATCH];
    long long until = now() + MOST_TIME;
    if (self->fd < 0)
        Py_RETURN_FALSE;
    epoll_wait(self->fd, rung, BATCH, 0); /* each ring is reported once */
    have_rung(self, 0);
    for (uint32_t place = 0; place < self->places; place++)
        self->boxes[place].waits = 0;
    do {
        for (uint32_t left = self->places; left > 0; left--) {
            uint32_t place = self->next++ % self->places; /* the next call goes on from here */
            int done = self->boxes[place].link == NULL ? 0 : serve(self, place);
            if (done < 0)
                return NULL;
            if (done == 2 || self->fd < 0 || (done && now() >= until))
                return PyBool_FromLong(self->fd >= 0);
        }
    } while (look(self));
    have_rung(self, 1);
    return PyBool_FromLong(is_any_posted(self)); /* posted by one that was not told yet */
}

#endif
