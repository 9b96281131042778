"""The text of the wire's pages that is not in docstrings: answers, types and fields."""

from __future__ import annotations

from collections.abc import Mapping

from aiops.wire import fields, messages
from aiops.wire.fields import MAX_LISTED, MAX_LOGGED, MAX_LOGGED_NAME, MAX_REASON, MAX_TEXT

ANSWERS: Mapping[str, str] = {
    "hello": "`challenge` or `welcome`",
    "challenge": "`prove`",
    "prove": "`welcome`",
    "define": "`model`",
    "describe": "`model`",
    "push": "`ack`",
    "reapply": "`ack`",
    "fetch": "`params`",
    "fetch_rows": "`rows`",
    "push_rows": "`rows`",
    "stats": "`report`",
    "ping": "`pong`",
    "leave": "closing",
    "join_round": "`round`",
    "settle_round": "`settled`",
    "take_task": "`task`",
    "shard_hello": "`challenge` or `shard_welcome`",
    "lead_hello": "`challenge` or `shard_welcome`",
    "ring_hello": "`ring_hello`",
    "relay_hello": "`challenge`",
    "expect_push": "`push_arrived`",
    "run_update": "`update_done`",
    "count_traffic": "`traffic_counted`",
    "send_rows": "`stored_rows`",
    "standby_hello": "`challenge` or `standby_welcome`",
    "journal_rows": "`rows_kept`",
    "promote": "`promoted`",
    "take_place": "`place_given`",
    "fence": "a fatal `error`",
    **dict.fromkeys(("kick", "pause", "resume", "take_snapshot", "drain", "rollback_to"), "`done`"),
}
"""The answer to each request (any may be answered by ``error`` instead)."""

TYPES: Mapping[str, str] = {
    "UInt": "uint",
    "Have": "uint or −1",
    "Real": "float",
    "OptReal": "float or nil",
    "Text": "text",
    "Reason": f"text, at most {MAX_REASON} characters",
    "Logged": f"list of at most {MAX_LOGGED} [name, float]",
    "bool": "boolean",
    "Nonce": "16 to 64 bytes",
    "Bytes32": "32 bytes, or none",
    "Blob": "bytes",
    "Plain": "map",
    "Offered": "list of [name, dtype, shape]",
    "Rows": "list of [name, dtype, shape, offset]",
    "Sparse": "list of [name, rows, width, dtype, initialiser, scale, seed, ...]",
    "Wants": "list of [first, last, version]",
    "Ranges": "list of [start, stop, version]",
    "ShardTable": "list of [host, port, first byte]",
    "Gate": "[] or [c_push, c_fetch]",
    "Factors": "list of float",
    "Versions": "list of uint",
    "Members": "list of [host, port, boolean]",
    "Positive": "uint, at least 1",
    "Numbers": f"list of uint, at most {MAX_LISTED:,}",
    "Examples": f"list of [task, start, stop], at most {MAX_LISTED:,}",
    "Parts": "list of parts",
}
"""The name that the pages give to each type of `aiops.wire.fields`."""

LEGEND = (
    f"**Types.** *uint*: {fields.TYPES['UInt']}. *float*: a"
    f" finite float. *text*: a string of at most {MAX_TEXT:,} characters. *bytes*: `bin`. *map*: a"
    " map from strings to plain values, which are nil, booleans, integers, floats, strings, bytes,"
    " and lists and maps of plain values, at most six deep. A *shape* is a list of integers, an"
    " *offset* a uint in bytes."
)

MEANINGS: Mapping[str, str] = {
    # everywhere
    "id": "The number of the request that this is or answers; the requester chooses it, rising"
    " from 1. 0 in the handshake, and in what was not requested.",
    "parts": "One entry per payload that follows; see [Parts](#parts).",
    "version": "The model's version: the number of updates applied to it.",
    # the handshake
    "protocol": f"{messages.PROTOCOL}: the version of this page.",
    "client": "The client's own id: random, chosen once, the same on all its connections.",
    "epoch": "1 on the client's first connection, one more on each that follows.",
    "name": "A name for people.",
    "role": "`worker` or `observer`.",
    "pongs": "Whether the client promises to answer a `ping` at any time.",
    "nonce": "Fresh random bytes.",
    "agent": "The client's software, for people.",
    "key": "The id of that token, of 8 bytes; empty in a `prove` to a relay.",
    "proof": "See [The token](#the-token); empty in a `welcome` without a token.",
    "run": "The name of the model's history, random: that of a server without kept state is another"
    " one each time it is started. See [Restarts](#exactly-once).",
    "hello.run": "That of the last `welcome`; empty before the first.",
    "generation": "The number of this start of the run's server, rising; 0 if the server keeps no"
    " state. See [Restarts](#exactly-once).",
    "hello.generation": "The highest `generation` of that run that the client was welcomed by;"
    " `generation_proof`: that of the same `welcome`, empty before the first.",
    "hello.generation_proof": "",
    "generation_proof": "A proof that the generation has begun, which no client can make; empty if"
    " the server keeps no state.",
    "acked": "The client's highest `seq` that an `ack` or `rows` of this run has answered.",
    "policy": "The server's algorithm, for people; `settings`: its settings.",
    "settings": "",
    "plan": "The client's part of the algorithm; see [The plan](#the-plan-and-gates).",
    "model": "The tensors in arena order; empty in `welcome` when the model is not defined: define"
    " it (again).",
    "last_seq": "The highest `seq` of this client that the server has taken, 0 for none.",
    "intact": "Versions of the model and of each table. What the client received by its last"
    " connection, at most of these, still is what it was; empty: nothing is.",
    "acks": "What an acknowledgement promises at present: `applied`, `written`, `durable` or"
    " `replicated`, for people.",
    "rolled_back": "The number of `seq` above `last_seq` up to `acked`: pushes that were"
    " acknowledged, and have been lost since, are among them.",
    "tables": "The tables; see [Tables](wire-tables.md). Offered in any order, announced in the"
    " order of their numbers.",
    "shards": "Empty, or the other servers that hold parts of the model; see"
    " [wire-shards.md](wire-shards.md).",
    # the model
    "tensors": "The offered tensors, in any order.",
    "created": "Whether this offer defined the model.",
    # pushing and fetching
    "seq": "The number of this push among this client's: at least 1, higher than every one before.",
    "fetch": "Whether the answer is to bring the parameters, as that of a `fetch` does.",
    "have": "The model version of which the client holds all tensors, −1 for none. The answer"
    " brings those that have changed since, which may be none. A version that the server has not"
    " reached counts as −1.",
    "wants": "Empty, or the tensors that are wanted, where these are not all or not held in one"
    " version: runs from number `first` up to, not including, `last`, in rising order, and the"
    " model version held (−1: none; one not reached counts as −1). `have` then does not count.",
    "coded": "Whether the answer may bring increments; see [Parts](#parts). Without the codecs:"
    " false.",
    "evaluation": "Whether the parameters are wanted as they are where the model is"
    " evaluated, which under some policies is not where gradients are computed. All that are wanted"
    " are sent, raw, whatever the client has.",
    "send_params.evaluation": "Whether the parameters are those where the model is evaluated. The"
    " follower has made them by a `run_update` of this version.",
    "lr_factors": "What the learning rate of the step is multiplied by, each from 0 to 100:"
    " none (1), one for all tensors, or one for each tensor of the gradient, in order. Of rows,"
    " none or one. It is a worker's own schedule, beside the server's. A server with filters, or"
    " with trimmed means, refuses factors above 1 of tensors.",
    "count": "The number of mini-batches whose gradients the push is made of: at least 1. In a"
    " schedule of examples or tokens it counts as one without a gate that accumulates, and as"
    " `longest` + 1 at most with one.",
    "current": "The model version of the parameters in this answer. It differs from `version` (the"
    " model's after this push) in the answer to a repeated push, and where increments come.",
    "used": "Whether the gradient is, or will be, part of an update. False: the policy ignores it"
    " (it is too stale, say) or a filter does, which is no error.",
    "staleness": "Updates between the gradient's base and this push: the most over its tensors.",
    "mean_staleness": "The same as a mean over the tensors, weighted by their bytes.",
    "ack.why": "Why it is not used, a sentence for people; empty if it is.",
    "vbar": "The mean of the algorithm's statistic (FASGD: v̄) over all parameters; nil without.",
    "vbars": "The same per tensor, float32, little endian, in arena order; empty without.",
    "gate": "Empty, or c_push and c_fetch of the [gates](#the-plan-and-gates), where the server"
    " chooses them to keep to a bandwidth budget.",
    # tables
    "table": "The table's number: its index, from 0, in the `tables` of `welcome` or `model`.",
    "push_rows.version": "The table's version that the rows were fetched at.",
    "rows.version": "The table's version: the number of pushes applied to it.",
    "rows.staleness": "Pushes applied to the table between that version and this push; 0 without.",
    # statistics, errors
    "log.values": f"Numbers by name, such as `loss`: finite, each name once and of at most"
    f" {MAX_LOGGED_NAME} bytes. They are means since the last `log`. A client sends one a second"
    " at most.",
    "compute": "The seconds that the worker has computed so far, and `idle` those that it has"
    " waited for the server; nil: it does not say. Where the plan has `log_every`, a worker says"
    " it at these intervals, whether it has numbers or not.",
    "idle": "",
    "report": "The statistics; keys come and go with releases.",
    "code": "See [Errors](#errors).",
    "text": "A sentence for people; `details`: its facts.",
    "details": "",
    "fatal": "Whether the server closes the connection after this.",
    # shared memory
    "segment": "Its number, from 1 to 256: the sender's own choice; 0, from a client: a mailbox.",
    "nbytes": "The number of its bytes that may be mapped.",
    # averaging
    "host": "An IP address (no name) at which the other workers reach this one.",
    "port": "The port there; 0 to withdraw.",
    "rounds": "The number of averages this worker has taken over so far; 0 marks it as new.",
    "digest": "SHA-256 of the MessagePack of the model's tensors as `model` announces them.",
    "number": "The round's number, rising from 1; 0 in an empty round.",
    "rank": "The index in `members`, from 0: in `round` the receiver's, in `ring_hello` the"
    " sender's.",
    "members": "The workers of the round in the order of the ring, and whether their models count.",
    "secret": "A secret that only the members of the round are told.",
    "join_round.have": "The name of the mean that this worker took over last and keeps; none"
    " without a codec, or before the first.",
    "base": "The name of the mean to which the chunks of this round are differences; none: they are"
    " values.",
    "codec": "The codec of those differences ([below](#codecs)); empty without a `base`.",
    "settles": "Whether the copy has the effect of examples that do not count yet.",
    "round.settles": "Whether each member reports the end of the round with `settle_round`"
    " ([below](#settling)).",
    "whole": "Whether all of the mean has come; else this worker has given the round up.",
    "settle_round.seen": "The examples whose effect is in this worker's copy and in no round that"
    " was taken; ranges as in `take_task`.",
    "taken": "Whether the mean is to be taken over.",
    "counted": "Whether the examples that the worker listed have been seen.",
    "reset": "Whether one of the listed examples was not this worker's any more.",
    "relay": "Where the members meet if they cannot reach each other, as `host:port`; or empty.",
    "ring_token": "By which the relay admits the members of this round; none without a `relay`.",
    "hop": "The number of workers that the chunk will have reached with this one, from 1.",
    "seal": "The HMAC of the chunk on a connection through a relay; none on a direct one.",
    "ring": "The name of the round's ring at the relay ([below](#through-a-relay)).",
    "sender": "The rank of the worker that sends chunks on the connection, and `ring_hello` first.",
    "sends": "Whether that is this worker; else this is the one that receives them.",
    "relay_ready.proof": "The HMAC by which the relay shows that it knows the ring's token.",
    # data sets
    "take_task.name": "The name of the data set, 1 to 256 characters.",
    "examples": "The number of its examples. It, `block` and `seed` are the same in all requests.",
    "block": "How it is shuffled; see [The order](#the-order).",
    "seed": "Of the order.",
    "take_task.epoch": "The epoch to begin with, from 0, if the server does not know the data set.",
    "epochs": "The task is of an epoch below this one.",
    "size": "The most examples that the task may have; 0: no task is wanted.",
    "wait": "True: the answer may take up to 10 s, if others are still at the rest.",
    "holder": "The id of the client that pushes for the task; empty: the sender.",
    "keeps": "The tasks of this data set that the sender took and is not done with. The rest of"
    " any other task that it took goes to other workers.",
    "seen": "Ranges of positions, `start` up to, not including, `stop`, within a task. In"
    " `take_task` they count at once, in `cover` when the push is used.",
    "task": "The task's number, from 1; 0: there is none.",
    "task.epoch": "Of the task; if there is none: the first epoch that is not complete.",
    "start": "The first position of the task in the order of its epoch; `stop`: the one after its"
    " last.",
    "stop": "",
    "over": "Whether all examples of all epochs below `epochs` have been seen.",
    "cover.seq": "That of the next push.",
    # shards
    "shard_hello.run": "What the lead's `welcome` called its run.",
    "shard_parts.version": "The model's in an answer, 0 in a push.",
    # between servers
    "shard": "Which of the `shards` it is, from 1.",
    "load_shard.plan": "`push_codecs` and `fetch_codec`: the codecs that clients use."
    " `spread_tables`, if rows of tables lie on all shards: the tables, as `define` has them;"
    " `rows`, if the follower begins with rows: how many of each, whose numbers and values are"
    " the last payloads. `sampled`, if the lead has filters: whether they look at values of"
    " the parameters, beside those of gradients.",
    "left": "How many messages of the same answer follow.",
    "worker": "Whether the client's role at the lead is `worker`.",
    "standby": "Whether it is the standby of a lead, and asks that of a follower.",
    "lead_proof": "A proof that it is the lead of this generation of the run ([below](#the-lead));"
    " empty if the lead keeps no state, and at its first start.",
    "share_secret.secret": "As in the file [`generation`](state.md).",
    "request": "The id of the client's request; its `shard_parts` have the same.",
    "ranges": "Bytes of the arena, and the version of their tensors.",
    "push": "A push by the lead's count; 0 for none.",
    "work": "What to do: `weights` (if the gradient is to be collected), `steps`, `scalars` and"
    " `scales` (what the factor is multiplied by; without them 1; if a step is to be taken) by"
    " tensor, as float64, one number if all are equal; `touched`, int64 (nil: all); `factor`; with"
    " `measure`, `limits`, the largest norm of each group of tensors, float64 (0: it need not be"
    " measured), and `groups`, the group of each tensor touched, as `steps`; `spare` (not in"
    " place); `sent` (the version that the rule reads),"
    " `coded` (it is the delta replica's); `begins_sum` (drop what was collected before); `round`:"
    " `measure`, `rehearse` or `step` ([below](#orders)). Or `replica` alone: bring the delta"
    " replica up to the model, and let increments before that version go. Or `evaluation` alone:"
    " make the parameters where the model is evaluated, w − share · offset, with a share from 0 to"
    " 1 for each tensor, as `steps`. Or `sample`, a seed of 8 bytes, with `push` (0: it has no part"
    " of it): read the values at the positions of that seed,"
    " with `params` (true) also those of the version; all later ones are of this seed. Or `rows`,"
    " the number of a table, with `push` (apply the gradients of rows that came as this push),"
    " `step` and `scalars`.",
    "increments": "The first byte of a piece, the one after its last, and the number of its newest"
    " increments that are sent.",
    "keep": "Whether it is kept.",
    "kept": "Whether the follower keeps a state of its own.",
    "update": "The `id` of the last update that it has done; 0: none.",
    "measured": "Whether it has not taken the step of that update, but done an earlier round.",
    "largest": "The largest magnitude in the parts; 1e18 if they are coded.",
    "update_done.proof": "After a rehearsal, as float64, little endian: of how many more updates"
    " it is proven that their results are finite; the largest magnitude of their gradients, times"
    " `factor`, and of their `steps`; the least and the largest of each of their `scalars`.",
    "holds": "`portions`: the pushes of which it has its part, by the lead's count; `versions`:"
    " those that it keeps, each with whether it is one of the delta replica; `snapshots`: the rows"
    " of the lead's journal of which it has a snapshot; `reached`: the row of its last order;"
    " `history`: the generations of its lead, each with the row behind which it began; `place`:"
    " the number of its place, if it has taken that as a standby; `generation`: that of its own"
    " state.",
    "generations": "Numbers of generations, rising.",
    "began": "For each of them, the row of the lead's journal behind which it began.",
    "cuts": "Rows of the lead's journal, rising.",
    "why": "Empty, or the reason, a sentence.",
    "total": "Bytes per second of all clients together; 0: without a limit.",
    "each": "The same of each client.",
    "weights": "By the id of a client, a float above 0, at most 4: its turns, relative to others'.",
    "budget_used.nbytes": "Bytes that have crossed since the last such message.",
    "second": "Bytes that crossed in the last second.",
    "backlog": "Bytes that wait for their turn.",
    "busy": "The number of connections with a message on its way.",
    "limited": "Whether a connection had to wait.",
    "shard_state.run": "Empty, or the run that it holds a shard of.",
    "state": "Empty, or its part of the statistics about the state that it keeps.",
    "shard_state.shards": "The number of shards.",
    "shard_state.version": "The newest version that it has computed.",
    "replica": "Whether the version is the delta replica's: the parameters as clients of coded"
    " fetches hold them.",
    "fault": "Empty, or `code`, `text` and `details` of why the push cannot be used.",
    "sums": "The rule's statistic or gauge, int64, little endian: one per tensor touched; zeros, or"
    " empty, without either. After measuring: the sum of squares of each group, float64. After a"
    " rehearsal: the first tensor, of those that lie here, whose result would not be finite, or −1."
    " Of the delta replica: one per piece, the bytes of its increment, −1 if it has to be sent as"
    " it is, −2 if it has not changed. Of a sample, as float64: the largest magnitude, and the"
    " values in the order of the arena, first the gradient's (0 where it has none) and then the"
    " parameters'.",
    "push_arrived.seed": "8 bytes: zeros until the lead has drawn one. Empty: nothing was read.",
    "update_done.seed": "The same.",
    "values": "At the positions in this part of the model, as float64, little endian, multiplied"
    " as [filters](filters.md) see them.",
    # standbys
    "standby_hello.run": "Empty, or the run that the standby has a state of.",
    "standby_hello.generation": "The primary's generation, when it last fed this standby; 0 at"
    " first.",
    "standby_hello.generation_proof": "The proof of that generation; empty at first.",
    "standby_welcome.secret": "The run's, as in the file [`generation`](state.md).",
    "fence.generation_proof": "The proof of the generation.",
    "standby_hello.row": "The last row that the standby holds, from 1; 0: none.",
    "standby_welcome.row": "The row behind which the standby is fed.",
    "row": "A row of the lead's journal.",
    "snapshot": "The length of a [snapshot file](state.md) in bytes, or 0.",
    "starts": "`starts`: a list of [generation, row, versions], as in the file `generation`."
    " `places`, of a lead whose followers' standbys have taken some: a list of [shard, number].",
    "standby_welcome.shard": "The shard that the primary has: 0 the lead's, or a whole model.",
    "standby_welcome.shards": "The number of shards; 1: a whole model.",
    "snapshot_part.parts": "Bytes `start` to `stop` of the file, in order.",
    "first": "The first row's number; `last`: the last one's; `newest`: that of the primary's"
    " newest row.",
    "last": "",
    "newest": "",
    "journal_rows.parts": "Bytes `start` to `stop` of the segment, in order.",
    "written": "The row; `synced`, `applied` too.",
    "synced": "",
    "applied": "",
    "promoted.generation": "The first of the next term.",
    "take_place.run": "The run that it has a state of.",
    "take_place.shard": "The shard whose place it asks for, from 1.",
    "take_place.shards": "The number of shards.",
    "take_place.host": "The address at which the lead and clients are to reach it.",
    "take_place.port": "",
    "take_place.generation": "The highest of its primary's generations of which it knows.",
    "take_place.version": "The newest version that it has computed.",
    "place_proof": "A proof that it is of this run ([below](#the-place-of-a-follower)).",
    "place": "The number of the place: the first generation of a term, above those of all servers"
    " that had it before.",
    "lead_hello.place": "The number of the follower's place, the newest that the lead knows of; 0:"
    " no standby has taken it. A follower with a lower one answers a fatal `error`.",
    "fence.run": "The run whose standby was promoted.",
    "primary": "The server's URL.",
    "kick.client": "A client's `name`; or `#` and its number in the statistics.",
    "rollback_to.version": "The model's version in a snapshot that the server keeps.",
    "done.version": "The model's at present; of the snapshot that was taken, or is gone back to.",
    "done.count": "The connections that a `kick` has ended, else 0.",
    "clients": "By client: bytes in, bytes out, messages in, messages out, and two maps (in, out)"
    " by kind of: messages, bytes of overhead, bytes of payload.",
}
"""The meaning of each field; ``kind.field`` where a field means something else in one message."""
