"""Spread one model over several servers: a lead that decides, and followers that hold its parts.

Theory of operation
===================

**Placement.** `aiops.model.placement` cuts the arena's bytes into one run per shard. Shard 0 is the
lead's. A tensor that is cut has a piece on each side. A small model is given to fewer shards, or to
the lead alone; then pushes and fetches go straight to its engine. Embedding tables stay on the
lead, or their rows are spread by a hash (`aiops.model.row_shards`). Then clients send each server
its own rows, and a follower serves them without the lead (`aiops.shards.follower_rows`).

**Lead.** `Lead` wraps an ordinary `aiops.engine.engine.Engine`, whose store knows the layout of the
whole model but holds only the first part of its bytes. The engine decides as if there were no
shards: membership, policy, staleness, barriers, refusals and versions exist once, on the lead. The
lead translates in both directions. A push becomes an event for the engine when its portions are on
all shards; an `Apply` becomes orders, and `Applied` when all shards have done it; a reply with
parameters becomes the lead's portion and orders to send the others. `Followers` knows the addresses
and the losses; `Readmission` decides which servers can be led; a `ShardedModel`, made when the
engine distributes the model, has `Gathering`, `Updating`, and the versions that followers keep.

**Follower.** `Follower` has the connections and the portions of pushes, and dispatches orders. Its
`Shard`, made by `LoadShard`, holds a store of its pieces and carries out the orders about it. There
is no policy and no queue of updates. Its one decision is whether an update is written in place: if
no reader holds the current version here, and the lead has not ordered a spare arena. It publishes a
computed version only when a later order names it. Published any earlier, the shard would be ahead
of its lead, which may still order parameters of the version before.

**Orders.** They travel on one connection from the lead to each follower, so every follower carries
them out in the order in which they were decided:

==================  ==============================================================================
`ShareSecret`       have the run's secret, with which later leads prove that they are its leads
`LoadShard`         begin with these bytes of the model; it comes before all other orders
`NoteHistory`       have the lead's generations, of the last of which the next orders are
`ExpectPush`        reserve room for a client's portion of push n
`FinishPush`        free that portion, or keep it without counting its room
`RunUpdate`         run one update with push n, or bring the delta replica up to the model
`SendParams`        send a client (or the lead) these bytes of a version
`SendIncrements`    the same from the delta replica, for coded fetches
`HoldVersion`       keep a version that the rule will compare a gradient with, or let it go
`KeepSets`          remove the snapshots that no set needs
`SendRows`          send the lead all rows of tables that lie there, to be saved
`ClosePushes`       refuse clients' pushes of rows, or take them again
`SendAway`          end a client's connections, and take it no more
`CountTraffic`      report the bytes exchanged with each client
`PaceClients`       keep to this share of the bandwidth budgets
==================  ==============================================================================

An order about parameters names a version. A follower that is not at that version, and has not just
computed it, refuses the order, and the lead treats the follower as lost: a wrong version is never
sent.

**Clients.** A client opens one connection to the lead and one to each follower that holds bytes;
the shard table comes with the lead's welcome. Requests and answers go to and from the lead. Their
headers list all parts; a part that lies elsewhere has the codec ``shard`` and no bytes. Those bytes
cross between the client and the follower as `ShardParts` under the id of the request. The client's
connections stand and fall together: if one is lost, all are opened again, under a higher epoch.

**Gathering.** `Gathering` holds a push back until the lead has its own portion and each follower
has reported `PushArrived`. The engine then receives it as one message, with one verdict: a bad
value on any shard refuses the push on all. Later messages of the same client wait behind it, so
that each client's requests are decided in the order in which they were sent. Followers grant room
in the order of the lead's `ExpectPush`. Were room given to what arrives first, two pushes could
each hold room on one shard that the other needs on another, and both would wait for ever.

**Updates.** `Updating` sends each follower its learning rates, weights and scalars, runs the lead's
part, and gives the engine `Applied` when all have reported `UpdateDone`. One update is outstanding
on all shards together. Clipping by norm takes a round more, because the norm is a sum over shards:
first all measure, then all take the step with the factor that the lead computed. And a step whose
result may not be finite is rehearsed before, by the shards that have not proven theirs: they say
with each rehearsal how far their proof reaches, by which the lead counts (`ShardProofs`).

**Filters.** They are the lead's, and decide before the update on values of the gradient, and of the
version that it meets, at some positions (`aiops.filters`). Each server reads those in its part. A
follower says them with `PushArrived` and `UpdateDone`, so that they are there when the push's turn
comes. The engine has each push measured by a `MeasureJob`. `Measuring` joins the numbers of all
servers, and `Updating` orders a round of those that have not said theirs. The journal of the lead
has the joined numbers, as it has the sums of updates; a follower keeps nothing but the orders.

**Sinks.** A push is announced while its payloads arrive, between events. So `Lead.sink_for` returns
the orders of the announcement with the sink, and the server carries them out at once.

**Exactly once.** Only the lead's engine remembers sequence numbers and answers. A portion has no
effect until a `RunUpdate` names its push, which only the engine's decision brings about. If a
connection is lost, a push that has not reached the engine is forgotten on all shards, and its
repetition is a new push. A push that has reached the engine is decided whether its client is
connected or not; its repetition gets that answer, and `FinishPush` frees the portions that came
again.

**Budgets.** A bandwidth budget is that of all servers together. The lead divides it by the bytes of
the model, and each server keeps its own share (`aiops.shards.budget_shares`). Followers report what
has crossed, and the engine, which chooses the gates, receives one report about all servers.

**Lost peers.** A client whose portions stay away is reported by `Lead.overdue` and dropped. When a
follower is lost, its bytes and its part of the optimiser's state are lost too, so the lead stops
the model: pushes and fetches of parameters, waiting or new, are answered with `Unavailable`, an
outstanding update is never published, and no new snapshot of the whole model can be collected. The
lead and the other followers stay up; statistics and earlier files remain. To recover, start all
servers again from the last ``--save``. A follower whose lead is lost ends. A failed shard cannot
join again.

**States.** With ``--state`` every server has a journal (`aiops.durable`), and a lost one comes
back. The lead's is that of its engine, with the sums that followers have reported and the norms
that all have measured. A follower's has the orders that change something, and the portions that
came. Its reports wait until that is committed, so that an acknowledgement holds on all shards, and
orders that cannot be undone wait for the rows of the lead's that they follow from. So a follower
has never done what its lead does not remember, and lacks one update at most.

A follower says what it holds (`ShardState`) whenever a lead connects. The lead orders the
outstanding update again, which a follower that has done it answers from memory, has it drop
portions and versions that are not known, and keep those that are. Connections are not kept: while a
follower is lost, the lead ends its clients' connections with `Unavailable`, and they come back when
all shards are there. If a follower is at neither of the two versions that are possible, or lacks an
update or a portion that it had reported, the lead begins again, at an earlier moment that both have
(`aiops.shards.common_moment`).

**Rows of tables** that lie on a follower are no matter of the lead's. The follower journals the
pushes that clients send it, as a server alone does, and its answers wait for them. A snapshot has
the rows as they are when the capture's turn has come among them. A push of that time may be before
it on one server and after it on another: then it is among the rows of the journal that follow.

**Snapshots.** A snapshot of the whole model is a set, one of each server, of the same cut: the row
of the lead's journal after which they are captured. The lead's engine issues a `CaptureJob` in the
place of an update, and `Updating` orders it of the followers as it orders an update. So every
server captures its state between the same two updates; portions and orders that belong to later
ones are in the rows that follow. Each writes its own beside training. A follower says when its
snapshot is on the disk (`SnapshotSaved`), and `SnapshotSets` tells when the set is whole. Then
`KeepSets` has all remove older sets, and the rows that these alone need. A server goes on from its
newest snapshot that is not damaged, whole set or not, as its journal leads to the same moment. With
``--acks applied`` there are no journals. Then a server that was killed, a follower too, is behind
the others, and all go back to the newest set that all have.
"""
