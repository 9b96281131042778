/* What an exchange that has passed all conditions changes: the version, the optimiser's state,
 * accounts and statistics, the remembered answer and the record, in the order of the specification
 * (`UpdateQueue.at_once`, `Shortcut.update`, `Store.update`, `Member.exchanged`). An error here is
 * one of the server, as it would be there.
 */

#include "answers.h"

#define MOST_ARGUMENTS (10 + STATES)

/* Add up a statistic's sums, int64[tensors]. */
static int add_up(PyObject *sums, int64_t *total)
{
    Py_buffer view;
    int64_t each;
    if (PyObject_GetBuffer(sums, &view, PyBUF_SIMPLE) < 0)
        return -1;
    *total = 0;
    for (Py_ssize_t at = 0; at + (Py_ssize_t)sizeof each <= view.len; at += sizeof each) {
        memcpy(&each, (char *)view.buf + at, sizeof each);
        *total += each;
    }
    PyBuffer_Release(&view);
    return 0;
}

/* Have the gauge move the rate: `RateGain.note`. */
static int note_gain(const Answers *self, PyObject *sums)
{
    int64_t total;
    if (self->part[PART_gain] == Py_None)
        return 0;
    if (add_up(sums, &total) < 0)
        return -1;
    PyObject *found = PyObject_CallFunction(self->part[PART_gain], "L", (long long)total);
    Py_XDECREF(found);
    return found == NULL ? -1 : 0;
}

/* Take the staleness of a gradient into the moving mean: `RecentStaleness.note`. */
static int note_staleness(const Answers *self, const Pushed *push)
{
    PyObject *recent = self->part[PART_recent];
    long long count;
    double mean = PyFloat_AsDouble(get(recent, RecentStaleness_mean));
    if (PyErr_Occurred())
        return -1;
    if (!read_integer(get(recent, RecentStaleness__count), &count)) {
        PyErr_SetString(PyExc_TypeError, "a count is an integer");
        return -1;
    }
    double staleness = (double)push->staleness, most = MEMORY + 4 * mean;
    if (count < MEMORY) {
        count++;
        if (put(recent, RecentStaleness__count, PyLong_FromLongLong(count)) < 0)
            return -1;
    }
    staleness = most < staleness ? most : staleness;
    mean += (staleness - mean) / (double)count;
    return put(recent, RecentStaleness_mean, PyFloat_FromDouble(mean));
}

/* Count an update that begins: `UpdateQueue.at_once` from its last condition on. */
static int begin(const Answers *self, const Pushed *push, PyObject *scalars)
{
    PyObject *histogram = self->part[PART_histogram];
    PyObject *bins = get(histogram, StalenessHistogram_bins), *known, *sum, *staleness, *bin;
    long long least = push->staleness;
    while (least >= EXACT && least & (least - 1)) /* the power of two at or below it */
        least &= least - 1;
    if ((staleness = PyLong_FromLongLong(push->staleness)) == NULL)
        return -1;
    int done = -1;
    if (PyDict_Check(bins) && (bin = PyLong_FromLongLong(least)) != NULL) {
        known = PyDict_GetItemWithError(bins, bin);
        sum = known == NULL ? PyErr_Occurred() ? NULL : Py_NewRef(self->one)
                            : PyNumber_Add(known, self->one);
        if (sum != NULL && PyDict_SetItem(bins, bin, sum) == 0 &&
            add(self->part[PART_updates], UpdateQueue_tickets, self->one) == 0 &&
            add(histogram, StalenessHistogram_total, staleness) == 0)
            done = scalars == Py_None ? 0 : note_staleness(self, push);
        Py_XDECREF(sum);
        Py_DECREF(bin);
    }
    Py_DECREF(staleness);
    return done;
}

/* Return whether the next version is made by compiled kernels. */
static int is_compiled(const Answers *self, PyObject *current)
{
    if (!is_of(current, Version_class) || get(self->part[PART_pool], SnapshotPool_current) != current ||
        !is_of(get(current, Version_room), Arena_class))
        return 0;
    for (Py_ssize_t index = 0; index < self->section_count; index++) {
        PyObject *kernel = PyList_GetItem(self->part[PART_kernels], index);
        if (kernel == NULL || (PyObject *)Py_TYPE(kernel) != self->part[PART_compiled_kernel])
            return (PyErr_Clear(), 0);
    }
    return 1;
}

/* Return where the next version is written, a new reference: in place, or as `SnapshotPool.target`
 * says. */
static PyObject *target_of(const Answers *self, PyObject *current)
{
    PyObject *store = self->part[PART_store], *pool = self->part[PART_pool], *found;
    long long until;
    if (is_true(get(store, Store__leased)) == 0 &&
        is_true(get(pool, SnapshotPool_returned)) == 0 &&
        read_integer(get(pool, SnapshotPool__until), &until) && until > 1 &&
        is_true(get(current, Version_readers)) == 0 &&
        is_true(get(current, Version_poisoned)) == 0)
        return put(pool, SnapshotPool__until, PyLong_FromLongLong(until - 1)) < 0
                   ? NULL
                   : Py_NewRef(current);
    PyErr_Clear();
    found = PyObject_CallMethod(pool, "target", "O", get(store, Store__leased));
    if (found == NULL ||
        (is_of(found, Version_class) && is_of(get(found, Version_room), Arena_class)))
        return found;
    PyErr_SetString(PyExc_TypeError, "the pool gives no version to write to");
    Py_DECREF(found);
    return NULL;
}

/* Return a section's rows of learning rates or scalars, which have one for each tensor. */
static PyObject *rows_of(const Answers *self, PyObject *array, PyObject *span)
{
    return self->section_count == 1 ? Py_NewRef(array)
                                    : PyObject_GetItem(array, PyTuple_GetItem(span, 3));
}

/* Update a section by its kernel, a function that Numba has compiled. */
static PyObject *update_section(const Answers *self, PyObject *base, PyObject *room,
                                Py_ssize_t index, PyObject *steps, PyObject *scalars)
{
    PyObject *span = PyTuple_GetItem(self->part[PART_spans], index); /* lo, hi, src, rows, factor */
    PyObject *kernel = PyList_GetItem(self->part[PART_kernels], index);
    PyObject *master = PyList_GetItem(self->part[PART_masters], index);
    PyObject *states = PyList_GetItem(self->part[PART_states], index);
    PyObject *source = PyTuple_GetItem(get(base, Arena_sections), index);
    PyObject *target = PyTuple_GetItem(get(room, Arena_sections), index);
    PyObject *gradient =
        PyTuple_GetItem(get(self->part[PART_gradient], Arena_sections), index);
    if (span == NULL || kernel == NULL || master == NULL || states == NULL || source == NULL ||
        target == NULL || gradient == NULL)
        return NULL;
    PyObject *function = PyObject_GetAttrString(kernel, "_update");
    PyObject *constants = PyObject_GetAttrString(kernel, "_constants");
    PyObject *step = rows_of(self, steps, span), *flat = NULL, *found = NULL;
    PyObject *given[MOST_ARGUMENTS];
    int count = 0;
    if (scalars != Py_None) {
        PyObject *rows = rows_of(self, scalars, span);
        flat = rows == NULL ? NULL : PyObject_CallMethod(rows, "reshape", "i", -1);
        Py_XDECREF(rows);
    }
    Py_ssize_t state_count = PyTuple_Size(states);
    if (function != NULL && constants != NULL && step != NULL &&
        (flat != NULL || scalars == Py_None) && state_count >= 0 && state_count <= STATES) {
        for (Py_ssize_t part = 0; part < 3; part++)
            given[count++] = PyTuple_GetItem(span, part);
        given[count++] = step;
        if (flat != NULL)
            given[count++] = flat;
        given[count++] = PyTuple_GetItem(span, 4);
        given[count++] = master == Py_None ? source : master;
        given[count++] = gradient;
        given[count++] = target;
        for (Py_ssize_t state = 0; state < state_count; state++)
            given[count++] = PyTuple_GetItem(states, state);
        given[count++] = constants;
        PyObject *arguments = PyTuple_New(count);
        for (int at = 0; arguments != NULL && at < count; at++)
            PyTuple_SetItem(arguments, at, Py_NewRef(given[at]));
        found = arguments == NULL ? NULL : PyObject_CallObject(function, arguments);
        Py_XDECREF(arguments);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the rule has more arrays than compiled code knows");
    Py_XDECREF(function);
    Py_XDECREF(constants);
    Py_XDECREF(step);
    Py_XDECREF(flat);
    return found;
}

/* Publish a version that was written, in place or not: `Store.commit`. */
static int commit(const Answers *self, const Pushed *push, PyObject *target, PyObject *sums)
{
    PyObject *store = self->part[PART_store];
    if (put(store, Store_busy, Py_NewRef(Py_False)) < 0 ||
        put(store, Store__making, Py_NewRef(Py_False)) < 0 ||
        put(target, Version__changed, Py_NewRef(Py_None)) < 0 ||
        put(target, Version__each, Py_NewRef(Py_None)) < 0 ||
        put(target, Version_level, PyLong_FromLongLong(push->level + 1)) < 0 ||
        put(target, Version_number, PyLong_FromLongLong(push->version)) < 0 ||
        put(target, Version__parts, Py_NewRef(Py_None)) < 0)
        return -1;
    if (get(store, Store_current) != target) {
        PyObject *said = PyObject_CallMethod(self->part[PART_pool], "publish", "O", target);
        Py_XDECREF(said);
        if (said == NULL || put(store, Store_current, Py_NewRef(target)) < 0 ||
            put(store, Store__leased, Py_NewRef(Py_False)) < 0)
            return -1;
    }
    if (!self->has_statistic)
        return 0;
    int64_t total;
    if (add_up(sums, &total) < 0)
        return -1;
    return put(store, Store_sums, Py_NewRef(sums)) < 0
               ? -1
               : put(store, Store_total, PyLong_FromLongLong(total));
}

/* Take the step: `Store.update`. Returns the sums; None if they are not wanted. */
static PyObject *step(Answers *self, const Pushed *push, PyObject *steps, PyObject *scalars,
                      int wanted)
{
    PyObject *store = self->part[PART_store], *sums = NULL, *all = NULL, *target = NULL;
    PyObject *current = Py_NewRef(get(store, Store_current));
    if (!is_compiled(self, current)) {
        Py_DECREF(current);
        bring_payload(self);
        PyObject *sections = get(self->part[PART_gradient], Arena_sections);
        return PyObject_CallFunctionObjArgs(self->part[PART_update], sections, steps, scalars,
                                            NULL);
    }
    PyObject *base = Py_NewRef(get(current, Version_room));
    if ((target = target_of(self, current)) != NULL &&
        put(store, Store_busy, Py_NewRef(target == current ? Py_True : Py_False)) == 0) {
        PyObject *room = get(target, Version_room);
        int done = run_loops(self, push, base, room, steps, scalars);
        if (done > 0) /* where sums are all zero, and go nowhere, there are none */
            sums = wanted ? sums_of(self) : Py_NewRef(Py_None);
        else if (done == 0) {
            bring_payload(self);
            all = PyTuple_New(self->section_count);
        }
        for (Py_ssize_t index = 0; all != NULL && index < self->section_count; index++) {
            PyObject *found = update_section(self, base, room, index, steps, scalars);
            if (found == NULL || PyTuple_SetItem(all, index, found) < 0)
                Py_CLEAR(all);
        }
    }
    if (all != NULL && self->section_count == 1)
        sums = Py_NewRef(PyTuple_GetItem(all, 0));
    else if (all != NULL)
        sums = PyObject_CallFunctionObjArgs(self->part[PART_concatenate], all, NULL);
    if (sums != NULL && commit(self, push, target, sums) < 0)
        Py_CLEAR(sums);
    Py_XDECREF(all);
    Py_XDECREF(target);
    Py_DECREF(base);
    Py_DECREF(current);
    return sums;
}

/* Give v̄ of the model and of its tensors: `Store.statistic`. */
static int read_statistic(const Answers *self, PyObject **vbar, PyObject **vbars)
{
    PyObject *store = self->part[PART_store];
    *vbar = *vbars = NULL;
    if (!self->has_statistic) {
        *vbar = Py_NewRef(Py_None);
        return (*vbars = PyBytes_FromStringAndSize(NULL, 0)) == NULL ? -1 : 0;
    }
    Py_buffer sums, units;
    long long total;
    if (!read_integer(get(store, Store_total), &total)) {
        PyErr_SetString(PyExc_TypeError, "the sum of a statistic is an integer");
        return -1;
    }
    if (PyObject_GetBuffer(get(store, Store_sums), &sums, PyBUF_SIMPLE) < 0)
        return -1;
    if (PyObject_GetBuffer(self->part[PART_units], &units, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&sums);
        return -1;
    }
    Py_ssize_t tensors = self->vbars_width / 4;
    if (sums.len == 8 * tensors && units.len == sums.len &&
        (*vbars = PyBytes_FromStringAndSize(NULL, self->vbars_width)) != NULL) {
        for (Py_ssize_t tensor = 0; tensor < tensors; tensor++) {
            int64_t sum;
            double unit;
            memcpy(&sum, (char *)sums.buf + 8 * tensor, sizeof sum);
            memcpy(&unit, (char *)units.buf + 8 * tensor, sizeof unit);
            float mean = (float)((double)sum / unit);
            memcpy(PyBytes_AsString(*vbars) + 4 * tensor, &mean, sizeof mean);
        }
        *vbar = PyFloat_FromDouble((double)total / SCALE / (double)self->parameters);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a statistic has a value for each tensor");
    PyBuffer_Release(&sums);
    PyBuffer_Release(&units);
    return *vbar == NULL ? -1 : 0;
}

/* Note an exchange with its member: `Member.exchanged` and `Ledger.exchanged`. */
static int note(const Answers *self, const Pushed *push, PyObject *now, PyObject *said)
{
    PyObject *member = self->part[PART_member], *answers = get(member, Member_answers);
    PyObject *ledger = get(member, Member_ledger), *seq;
    if (get(ledger, Ledger__alike) != self->part[PART_push_parts]) { /* others have been counted */
        PyObject *counted = PyObject_CallMethod(ledger, "count_exchanges", NULL);
        Py_XDECREF(counted);
        if (counted == NULL)
            return -1;
    }
    if ((seq = PyLong_FromLongLong(push->number[1])) == NULL ||
        put(member, Member_last_seq, Py_NewRef(seq)) < 0 ||
        add(member, Member_pushes, self->one) < 0 ||
        put(member, Member_staleness, PyLong_FromLongLong(push->staleness)) < 0 ||
        put(member, Member_answered, Py_NewRef(now)) < 0 ||
        PyObject_SetItem(answers, seq, said) < 0 ||
        put(ledger, Ledger__settled, seq) < 0 ||
        put(ledger, Ledger__last, Py_NewRef(self->part[PART_push_parts])) < 0 ||
        put(ledger, Ledger__alike, Py_NewRef(self->part[PART_push_parts])) < 0 ||
        add(ledger, Ledger__exchanges, self->one) < 0 ||
        (push->number[2] < 0 && add(ledger, Ledger__batches, self->one) < 0))
        return -1;
    if (PyObject_Size(answers) > REMEMBERED) {
        PyObject *oldest = PyObject_CallMethodObjArgs(answers, names[NAME_popitem], Py_False, NULL);
        Py_XDECREF(oldest);
        return oldest == NULL ? -1 : 0;
    }
    return 0;
}

/* Bring the replica up to the model, if answers come from it: `CodedAnswers.follow`. */
static PyObject *follow(const Answers *self, const Pushed *push)
{
    return is_coded(self) ? PyObject_CallFunction(self->part[PART_follow], "L", push->number[2])
                          : Py_NewRef(Py_None);
}

PyObject *carry_out(Answers *self, const Pushed *push, PyObject *now, PyObject *record,
                    PyObject *steps, PyObject *scalars)
{
    PyObject *store = self->part[PART_store], *pace = self->part[PART_pace];
    PyObject *said = NULL, *vbar = NULL, *vbars = NULL, *found;
    Outcome outcome = {0};
    long long total, warned;
    if (begin(self, push, scalars) < 0)
        return NULL;
    if (record != Py_None && (outcome.leased = freeze(self)) < 0)
        return NULL;
    if (push->now >= PyFloat_AsDouble(get(pace, Pace_due))) {
        found = PyObject_CallMethod(pace, "note", "OL", now, push->version - 1);
        if (found == NULL)
            goto end;
        Py_DECREF(found);
    }
    int wanted = self->has_statistic || self->part[PART_gain] != Py_None; /* a row has their checksum */
    if ((outcome.sums = step(self, push, steps, scalars, wanted)) == NULL)
        goto end;
    if (note_gain(self, outcome.sums) < 0)
        goto end;
    if (!read_integer(get(store, Store_total), &total) ||
        !read_integer(get(self->part[PART_warnings], RunWarnings_total), &warned)) {
        PyErr_SetString(PyExc_TypeError, "the sum of a statistic is an integer");
        goto end;
    }
    if (total <= warned &&
        put(self->part[PART_warnings], RunWarnings_due, Py_NewRef(Py_True)) < 0)
        goto end;
    outcome.ticket = Py_NewRef(get(self->part[PART_updates], UpdateQueue_tickets));
    if ((outcome.followed = follow(self, push)) == NULL)
        goto end;
    if (record != Py_None && record_it(self, push, now, record, &outcome) < 0)
        goto end;
    if (read_statistic(self, &vbar, &vbars) < 0)
        goto end;
    said = Py_BuildValue("LOLdOOs", push->version, Py_True, push->staleness,
                         (double)push->staleness, vbar, vbars, "");
    if (said != NULL && note(self, push, now, said) < 0)
        Py_CLEAR(said);
end:
    Py_XDECREF(outcome.sums);
    Py_XDECREF(outcome.ticket);
    Py_XDECREF(outcome.followed);
    Py_XDECREF(vbar);
    Py_XDECREF(vbars);
    return said;
}
