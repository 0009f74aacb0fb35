"""The planner's tuning constants: how much effort it spends, and what it skips.

In:     (numbers only.)
Out:    `TUNING`, read wherever planning trades the quality of the plan for planning time.
Method: none of these numbers describes a program or a machine: rates and sizes are in `mesh/catalog.py` and `cost/`, and
        arithmetic tolerances are where they are used. Another number here gives a plan that is as correct, found sooner or
        later, and perhaps a little better or worse. Where no reason is given, a number was found by trial.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of planning; "part" is a fraction, "pairs" are pairs of choices on the edges of a planning problem."""

    # Programs: before anything is sharded

    hoisted_work: float = 0.02
    """Part of the work on samples. A value of the whole batch (a mask's denominator) that takes no more is hoisted before the
    loop over microbatches: every microbatch waits for it, and it saves a second loop."""
    joined_work: float = 0.2
    """Part of the step's work: the most that joins of all samples may take, while stages wait between forward and backward."""
    work_of_samples: float = 0.01
    """Part of the work that microbatches share out. Arrays are no samples if they share out as much, but for this, without."""
    work_apart: float = 0.1
    """Part of the work on what may be samples. Their rows are none if less of it can be done for each by itself."""
    most_rounds: int = 8
    """The most loops over microbatches, one after the other, where samples of one need results of the one before."""
    repeated_rounds: float = 0.5
    """Part of the step's work: the most that these loops may recompute."""
    stage_rounds: int = 16
    """The most rounds of microbatches forwards and backwards through a pipeline's stages: each is one more analysis."""
    written_steps: int = 8
    """The most trips of a loop of training steps to unroll into rounds: each is one more copy of the step to analyse, and one
    more analysis, so that twice as many take four times as long to plan (16: a minute)."""
    layers_work: float = 0.2
    """Part of the forward and backward passes' work. Scans of one length are split between stages if they do at least this:
    a smaller scan is no chain of layers, and splitting it makes programs longer for nothing."""
    fission_operations: int = 16
    """Operations per element of an equation. Shared ones with no more are done for each result: to keep theirs costs more."""
    fission_room: float = 1.25
    """Conditions are merged while the bytes of their results are at most this many times those of the largest alone."""

    padded_most: float = 1.75
    """The most times its length that a dim is padded to, so that more devices can split it: 5 heads become 8, 9 not 16."""
    padding_looks: float = 0.03
    """Part of a step that padding could win, and that products along such dims take, before a padded plan is tried."""
    padding_gains: float = 0.01
    """Part of a step by which padding must make it faster: unpadded programs are easier to read."""

    offloaded_least: float = 1e-3
    """Part of the largest of the arrays that may be offloaded. Smaller ones stay on the device when others are offloaded."""
    offload_gains: float = 0.01
    """Part of a step by which offloading must make it faster, where it fits without."""
    offloaded_reach: int = 4
    """Products. A value computed from results of more than so many before is offloaded itself, instead of recomputed from
    these, which would be on the device from then on. Layers have two and more."""
    fetched_reach: int = 4
    """Arrays. A copy of one in host memory is used again if no more others were read since: the last layers' weights."""

    # Decisions on one mesh

    untied_nodes: int = 700
    """Graphs with no more nodes are solved without ties: they take no time worth saving."""
    tie_repeats: int = 3
    """How many equal pieces in a row are taken for layers; two may be the two ends of something else."""
    tie_rounds: int = 4
    """Edges: the radius within which the neighbourhoods of two nodes are compared; differences farther away do not matter."""
    tie_stretch: int = 8
    """Equations that must be equal in a row before the distance between them is considered: fewer are equal everywhere."""
    untied_each: int = 2_000
    """Graphs with no more nodes are solved without ties on every mesh whose answer is nearly the best."""
    untied_seconds: float = 0.5
    """Seconds. The best answer is solved without ties if that takes no longer, whatever it may win."""
    proved_seconds: float = 5.0
    """Seconds. An answer found two axes at a time has no known gap without a bound: that is computed if it takes no longer."""
    misjudged: float = 3e-3
    """Part of the step. If the best plan takes longer or less than its price by more, its mesh is planned once more as if it
    were the only one: priced otherwise, it may have a better plan."""
    unaided_part: float = 0.01
    """Part of the step that this is expected to win; 0 to 2 % seen."""
    finalists_part: float = 1 / 3
    """Part of the time to plan all meshes that it may take on those nearly as fast as the best, whatever it may win."""
    finalists_seconds: float = 1.0
    """Seconds: the most that this may be."""
    descent_meshes: float = 2.0
    """Times the time to plan a mesh of two axes that a descent from its answer on three takes."""
    descent_node: float = 1e-4
    """Seconds of that for each node, if many are tied."""
    descent_seconds: float = 2.7
    """Seconds: a first descent that takes no longer is made whatever it may win, if the second axis won anything."""
    descent_part: float = 0.019
    """Part of all steps' time that it may take, too: a demo of short steps is planned in 2 s instead of 4."""
    unaided_seconds: float = 5.0
    """Seconds: the most that this may take."""
    named_seconds: float = 13.0
    """Seconds: the same on several hosts where memory is ample, whatever it may win, with all others priced below the best."""
    named_part: float = 0.04
    """Part of all steps' time: the same on one host, if a descent to three axes is the best and leaves a gap."""
    settled_seconds: float = 7.0
    """Seconds. Such an answer is refined over all axes (`settle` in `intra_op/shard.py`), once and as often as fits."""
    settled_quickly: float = 1.5
    """Seconds. If refining it once takes no longer, roughly, that is done for a gap of more than `large_gap`, too."""
    settled_part: float = 0.09
    """Part of the step that refining it more than once is expected to win."""
    untied_near: float = 0.02
    """Part of the step: the most that solving without ties is expected to win."""
    untied_pairs: int = 30_000_000
    """Pairs. Beyond this, the tables of the problem without ties take gigabytes."""
    unmeant_gather: float = 100.0
    """Factor on the seconds of a gather that a method of the papers does not have: for models not written for the method."""
    fused_latency: float = 0.1
    """Part of its latency that a small collective is charged, until a program shows how many are fused: about ten are."""

    bucket_step: int = 4
    """How many times smaller messages get where nothing fits the memory budget and they take part in that."""
    bucket_part: float = 0.02
    """Part of the bytes alive: values of a message that are less at the fullest moment take no part in it."""

    # The integer program

    fold_elements: int = 40_000_000
    """Elements of the largest table [u, node, v] that folds a node with two neighbours: 320 MB of float64."""
    table_entries: float = 4e7
    """Entries of all tables (`wide_elimination.py`) at most: about a second, and 200 MB."""
    tiny_tables: float = 1e6
    """The same where tables take less time than messages: then nothing else is tried."""
    equal_edges: int = 300
    """Edges from which on equal tables are shared: with fewer, each is computed by itself."""
    equal_rows: int = 100_000
    """Triples of choices of a folded node and its neighbours from which on equal rows of their tables are looked for."""
    compared_choices: int = 400_000
    """The most comparisons of a node's choices, over all choices of its neighbours; else dominated ones are kept."""
    message_rounds: tuple[int, ...] = (60, 120, 200)
    """Rounds of message passing before each attempt of the ILP: more each time, since the rest is harder."""
    message_sweeps: int = 8
    """Forward and backward sweeps over the nodes at the end, which pick the choices that the bound suggests."""
    message_stalled: float = 0.02
    """Part of the distance to the best answer. If `message_look` rounds raise the bound by less, no more are done."""
    message_look: int = 10
    """Rounds between checks of the bound's progress; half as many beyond `huge_core` pairs, where a round takes long."""
    message_small: int = 4_096
    """Pairs. For smaller tables the columns of all widths are computed at once."""
    message_chunk: int = 200_000
    """Entries of tables that are computed at once: 1.6 MB of float64, which stay in a core's cache."""
    message_call_seconds: float = 1.6e-5
    """Seconds for each level of nodes and each array of tables of a round, forward and back, roughly."""
    message_pair_seconds: float = 8e-9
    """Seconds for each pair of a round."""
    solver_pairs_per_second: float = 3.5e4
    """Pairs of its problem that the ILP solver gets through in a second, roughly."""
    loose_gap: float = 200.0
    """Times as long, for a relative gap of one between bound and incumbent: of a loose relaxation it proves little."""
    asked_part: float = 1 / 8
    """Part of the solver's seconds that one solve may take, by its estimate, where all work repays."""
    rough_gap: float = 1e-2
    """Part of the cost. Where such a gap is allowed, the first answer of message passing within it is taken."""
    small_core: int = 60_000
    """Pairs. A problem with no more goes to the ILP whole, which proves its answer optimal."""
    early_core: int = 5_000
    """Pairs. While more rounds of message passing can still prune the problem, the ILP gets no larger one."""
    large_core: int = 500_000
    """Pairs. Beyond this (three axes, models without equal layers) a small gap is left: the ILP would use all its time."""
    huge_core: int = 2_000_000
    """Pairs. Beyond this (three axes as a whole) message passing alone has to do: there are no more rounds after the first."""
    large_gap: float = 2e-3
    """Part of the cost: that gap. Also left where bytes have a price, or the ILP would take long: over `early_core` pairs."""
    promising_choices: int = 8
    """The most choices per node that the ILP gets of a larger core, beside those around the best answer known."""
    fewer_choices: tuple[int, ...] = (8, 4, 2)
    """Choices per node that are tried, one number after the other, where more would be too many for the ILP."""
    room_parts: tuple[float, ...] = (1 / 32, 1 / 8, 1)
    """Parts of the room between the bounds: first only choices near the lower bound, whose best answer lowers the upper."""
    nearly_whole: float = 2 / 3
    """Part of a core's pairs. If choices near the lower bound have more, the ILP gets all at once, in nearly the same time."""
    first_slack: float = 2e-3
    """Part of the cost by which these first choices may exceed the lower bound."""
    polish_nodes: tuple[int, ...] = (24, 80)
    """Nodes of a neighbourhood that is solved anew, in successive rounds: small neighbourhoods first."""
    polish_rounds: int = 3
    """The most rounds."""
    polish_gain: float = 1e-4
    """Part of the cost. A round that wins less is the last."""
    polish_pairs: int = 40_000
    """Pairs of a neighbourhood with memory rows, to which elimination does not apply: larger ones are skipped."""
    polish_node_seconds: float = 1.3e-3
    """Seconds for each node of a problem, roughly."""
    exchanged_nodes: tuple[int, ...] = (1_000_000, 24, 6, 1)
    """Nodes that take over another answer's choices together, in successive exchanges."""
    polish_core: int = 1_000
    """The most pairs that elimination may leave of a neighbourhood for the solver."""
    axis_gain: float = 1e-4
    """Part of the cost. If fixing any one axis and solving the others wins less, an answer on three axes is taken."""
    search_steps: int = 50
    """Steps per node of the searches without proof (`solver="mcmc"` and others)."""

    # Memory

    memory_rows: int = 8
    """Program points over budget that become memory rows of the problem at once."""
    peak_fallen: float = 0.99
    """Part of a peak. Once memory falls below this, the next peak is another one, and may become a row of its own."""
    less_memory: tuple[float, ...] = (0.85, 0.7)
    """Parts of the bytes of a small problem's answer within which it is solved again if its gap exceeds `rough_gap`."""
    less_planes: int = 4
    """Cutting planes at most of such a solve: its answer need not be the best within these bytes, and is often none."""
    placed_part: float = 2e-4
    """Part of the most bytes alive at once. Smaller arrays are not placed: they fit in any gap."""
    placing_turns: int = 3
    """How often a program is sharded, at most, until it fits with the gaps between its arrays."""
    floor_moments: int = 4
    """Program points of each body, the fullest, for which the bytes that every sharding needs are proved."""
    rows_core: int = 10_000
    """Pairs. A problem with no more is solved with its memory rows directly; in others bytes get a price first."""
    prices: int = 10
    """The most prices on a byte that are tried."""
    cutting_planes: int = 30
    """The most times that a problem within a memory budget is solved again with the rows that its answer violates."""
    price_step: float = 4.0
    """Factor from one price to the next, until everything fits: ten of them span a factor of a million."""
    price_mixes: int = 2
    """Times that rows choose among the answers found at the different prices."""
    price_tries: int = 2
    """Times that all this is repeated with the rows that were found on the way."""
    far_over: float = 1.5
    """Times the budget: if the rows of a large problem need more, no answer that fits is searched for."""
    dear_bytes: float = 100.0
    """Times all seconds: the price of bytes over budget where any sharding that fits is welcome."""

    made_of: int = 8
    """In the prices of kernels, a fused value computed from more values than this goes through memory."""
    made_of_bytes: float = 1.25
    """Times the bytes of a value: the most that its operands may have for each kernel that reads it to recompute it."""
    slow_flops: float = 16.0
    """Operations per element: a value that takes more and has several readers is stored, as random bits are."""
    late_bytes: int = 1 << 22
    """Bytes. Smaller values may live through a loop; equations that free larger ones are moved before it."""
    again_bytes: int = 1 << 20
    """Bytes. Smaller values may live beside recomputed ones."""
    large_part: float = 1 / 8
    """Part of the largest array of a body. Equations that make an array as large wait for those that free others."""
    late_part: float = 1 / 8
    """Part of the bytes that become free: the most of what waits for that, since waiting may cost a pass over them."""
    fitting_turns: int = 8
    """The most plans that are made and compiled until the compiler agrees that one fits."""

    # The clock

    exposure_turns: int = 3
    """Problems that are solved on a mesh, each with the exposed collectives that simulating the answer before showed."""
    around_turns: int = 5
    """The same with the exposure that the best answer of a mesh shows, as long as its gap is more than `rough_gap`."""
    exposure_same: float = 5e-3
    """Part of the step. So near to the expected time nothing is solved again: that would win 0.2 % for a second of planning."""
    known_far: float = 0.01
    """Part of the step. A well-known plan that is expected to take this much longer than the best one is skipped."""
    loop_turns: int = 3
    """Trips of a loop that are simulated; each further one takes as long as the last of these."""

    # Stages

    max_segments: int = 256
    """The most positions at which a step may be cut: sums over pairs of them stay small."""
    shared_elements: int = 4096
    """Elements. A value with no more may be held by every stage, and crosses no border."""
    shared_part: float = 1 / 16
    """The same as a part of the largest parameter: the weights of a tiny model belong to one stage, too."""
    repeated_work: float = 1e-3
    """Part of the whole work. An equation with no more may be repeated in every stage that needs it."""
    around_border: int = 4
    """Operations before and after a cut position that characterize it: layers should be cut at equal positions."""
    odd_border: float = 5e-3
    """Cost of a border at an unusual position, relative to the bytes over the fullest border: it only breaks ties."""
    uneven_work: float = 1e-3
    """Cost of uneven work, likewise: it breaks the next ties."""
    stage_slacks: tuple[float, ...] = (0.1, 0.02, 0.0)
    """Parts by which the largest stage may exceed the least possible one, to send fewer bytes: each is tried."""
    balance_gain: float = 5e-3
    """Part of the step that a smaller one of these must win: with a larger one more stages are equal, and planned once."""
    beside_layer: float = 1.05
    """Times the work of its largest segment: the most that a layer larger than an even one may have."""
    joined_elements: int = 16
    """Elements. Values with no more are joined across stages element by element: norms, flags, counters."""
    copied_elements: int = 1024
    """Elements. A value computed from arguments with no more is recomputed wherever it is read: learning rates, random keys."""
    parts_of_memory: int = 64
    """Stages that share a mesh divide its memory in this many parts: finer divisions would make equal stages differ."""
    recompute_levels: int = 6
    """The most levels of recomputation of a stage that are distinguished: each is lowered and simulated."""
    uneven_stage: float = 1.5
    """Times an equal share of the work. The user is warned of a stage with more."""
    alike_work: float = 0.25
    """Part of each device's time. A method that splits samples alone warns of more work that all devices do alike."""
    most_parts: int = 16
    """The most parts that scans over layers are split into for even stages: each is a loop of its own to compile."""
    parts_tolerance: float = 0.05
    """Part of the largest stage: how much larger it may be than with finer parts."""
    stage_gap: float = 3e-3
    """Part of its cost: the gap of a stage's sharding that is left, and of each block of a search by axes, since closing it
    would take most of the time. Where messages come no nearer than `rough_gap` on a large problem, that gap is left too."""
    hand_gap: float = 1e-5
    """The same for a method of the papers, whose collectives must be exactly theirs, however little one costs."""
    layer_gap: float = 1e-2
    """The same for layers of the table, which only choose stages."""
    one_array: float = 0.02
    """Part of its time that a stage may lose to shard its part of a stack like the others: one array for the user."""
    borders_doubt: float = 0.05
    """Part by which the clock of borders, blind to what stages send within, may be wrong: others this near are planned, too."""
    borders_seconds: float = 0.5
    """Seconds: the most that one such plan may take."""
    near: float = 0.05
    """A candidate that cannot be faster than the best known one by more than this part is not solved under a memory budget;
    stages of more than `small_core` pairs may show that while they are solved."""
    microbatches_per_stage: int = 4
    """Microbatches per stage where the user gives no number: the bubble of 1F1B is then at most a fifth."""

    # The search

    meshes_share: float = 0.4
    """Part of all planning time that meshes without stages take; for progress."""
    layers_share: float = 0.4
    """Part of the search over pipelines that the costs of layers take; for progress."""
    third_axis_equations: int = 8000
    """A step with more equations is not sharded over three axes where nothing fits on two: microbatches are tried instead."""
    third_axis_bytes: float = 1.1
    """Times the budget. The same of a step whose least bytes found on two axes are more: a third axis saved none of them."""
    second_axis_gain: float = 1e-2
    """Part of the step that a second axis must win, for a third to be tried: where it won 0.5 %, the third won 0.02 %."""
    third_axis_gain: float = 1e-3
    """Part of the step that must be left to win for a third axis to be tried, and that other third axes must have won."""
    third_axis_worse: float = 0.1
    """Part of the step. If a third axis makes it slower by more, it is not solved twice, and no less even ones are tried."""
    nodes_per_second: float = 1e3
    """Nodes of a problem that planning on a mesh gets through in a second on one core, roughly."""
    pairs_per_second: float = 2.5e6
    """Pairs, likewise."""
    solve_share: float = 1 / 3
    """Part of that time that one solve takes, roughly."""
    repaying_steps: int = 10_000
    """Steps of training. A step of planning may take as long as it may save in this many."""
    hoped: float = 0.25
    """Part of the gap between the best known cost and the lower bound that more planning is expected to win."""
    stages_seconds: float = 25.0
    """Seconds that a search for stages takes, roughly, if it takes long: the number of pipelines planned is bounded."""
    stages_solves: float = 8.0
    """Times the time to shard the step on one mesh: what a search for stages takes otherwise, roughly."""
    clock_doubt: float = 5e-3
    """Part of the cost. Problems of up to `small_mesh_pairs` priced above the best by less are solved: the clock may differ."""
    descent_doubt: float = 0.03
    """Likewise for larger problems on three axes, which only descend from answers on other meshes."""
    small_mesh_pairs: int = 1_000_000
    """Pairs: half a second. Meshes with no more are planned whatever they may win."""
    accumulation_bytes: float = 0.1
    """Part of the bytes needed that twice as many microbatches must save, where nothing fits yet."""
    exposure_guessed: float = 0.05
    """Part of the step. For a new number of microbatches exposure is guessed: a bound above the best step by more ends it."""
    accumulation_meshes: int = 3
    """Meshes that are tried with microbatches: the best of those tried without."""
    stages_gain: float = 0.1
    """Part of the best step without stages. Within one host they are tried to win this much: the bubble uses up less."""
    table_layers: int = 16
    """Layers of equal work in the table; for more parts of a scan than this the table is interpolated."""
    layer_slack: float = 0.35
    """Part of an even layer by which layers may be uneven, so that more of them are equal, and are sharded once."""
    fewest_microbatches: int = 4
    """The least number of microbatches tried for a pipeline, if it divides the batch."""
    most_microbatches: int = 128
    """The largest."""
    few_microbatches: tuple[int, ...] = (1, 2)
    """Further numbers tried where there is no backward pass: then the pipeline fills at once."""
    guesses_solved: int = 12
    """The most times that layers are sharded for a candidate: where its time is a guess by scaling, or it exceeds memory."""
    finalists: int = 2
    """The fewest pipelines of the table that are planned in full."""
    most_finalists: int = 16
    """The most, for small programs."""
    roomy_finalists: int = 8
    """For this many finalists, one is added that would be faster but does not fit by the table."""
    finalist_equations: int = 6000
    """Equations, counting the program's once per finalist: this bounds the number of finalists."""
    table_doubt: float = 0.1
    """Part by which the table may be wrong: a pipeline whose bound is above the best step by more is left out."""
    kernels_doubt: float = 0.03
    """The same of bounds by kernels alone, which are seldom near."""
    generous: float = 4.0
    """Where no plan is known to fit: the most that a stage may take, in times the work shared evenly by all devices."""
    much_waiting: float = 0.03
    """Part of the step. Where devices idle longer, schedules that send or keep more to avoid it are tried too."""
    bubble_left: float = 0.5
    """Part of 1F1B's bubble that these schedules are assumed to leave."""
    stages_quick: float = 2.0
    """Seconds. Where memory binds, stages are searched if that takes no longer, whatever it may win."""
    calls_in_a_row: int = 64
    """Calls that stand for many: where calls do not wait for each other, a pipeline fills once for all of them."""


TUNING = Tuning()
