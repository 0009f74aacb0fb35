"""What planning takes pains with, and what it leaves alone: every number that was chosen, in one place.

In:     (numbers only.)
Out:    `TUNING`, read wherever planning decides between a better plan and a sooner one.
Method: none of these numbers says anything of a program or a machine: rates and sizes of those are in `mesh/catalog.py` and
        `cost/`, and the tolerances of arithmetic beside it. Another number here gives a plan that is as correct, found
        sooner or later, and perhaps a little better or worse. Where no reason is given, a number was found by trial.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers that steer planning; "part" is a fraction, "pairs" are pairs of choices that meet on an edge of a problem."""

    # Programs: before anything is sharded

    hoisted_work: float = 0.02
    """Part of the step's work. What is needed of the whole batch (a mask's denominator) and takes no more is computed before
    the loop over microbatches: every microbatch waits for it, and it saves a second loop."""
    joined_work: float = 0.2
    """Part of the step's work. What is done of all samples at once between a pipeline's forward and backward passes, while its
    stages wait, takes no more."""
    most_rounds: int = 8
    """Loops over microbatches, one after the other, at most: of each, samples wait for what the one before makes."""
    repeated_rounds: float = 0.5
    """Part of the step's work that these loops may do once more."""
    stage_rounds: int = 16
    """How often microbatches go forwards and backwards through a pipeline's stages, at most: each time costs one more look at
    the step, and nothing is done again."""
    written_steps: int = 8
    """Turns of a loop of training steps that are written out for that, at most: each is one more copy of the step to look at,
    and one more look, so that twice as many take four times as long to plan (16: a minute)."""
    layers_work: float = 0.2
    """Part of the forward and backward passes' work. Scans of one length are cut between stages if they do at least so much:
    a smaller scan is no chain of layers, and cutting it makes programs longer for nothing."""
    fission_operations: int = 16
    """Operations for each element that an equation reads or makes. A condition is split between results that share no more
    than that: making the shared part twice costs less than keeping its results."""
    fission_room: float = 1.25
    """Conditions are merged as long as together they make at most so many times the bytes of the largest alone."""

    padded_most: float = 1.75
    """Times its length that a dim is made longer at most, so that more devices split it: 5 heads become 8, 9 not 16."""
    padding_looks: float = 0.03
    """Part of a step that could be won, and of its products along these dims, before it is planned with longer dims, too."""
    padding_gains: float = 0.01
    """Part of a step by which longer dims must make it faster: programs as they are written are easier to read."""

    offloaded_least: float = 1e-3
    """Part of the largest of the optimizer's arrays. Smaller ones stay on the device where the others go to the hosts."""

    # Decisions on one mesh

    untied_nodes: int = 700
    """Graphs with no more nodes are solved as they are: they take no time worth saving."""
    tie_repeats: int = 3
    """So many alike in a row are layers; two may be the two ends of something else."""
    tie_rounds: int = 4
    """Edges. So far the surroundings of two nodes are compared: what differs farther away does not change what is best here."""
    tie_stretch: int = 8
    """Equations. So many must be equal in a row before a distance between them is looked at: fewer are found everywhere."""
    untied_each: int = 2_000
    """Graphs with no more nodes are solved without ties on every mesh whose answer is nearly the best."""
    untied_seconds: float = 0.5
    """Seconds. The best answer is solved without ties whatever that wins, if it takes no longer."""
    proved_seconds: float = 5.0
    """Seconds. Of the best answer, where it was found two axes at a time, a bound is looked for whatever that wins, if it takes
    no longer: without one nothing is known of it."""
    settled_seconds: float = 7.0
    """Seconds. As often as that takes no longer, roughly, and once at least, such an answer is solved around."""
    settled_part: float = 0.09
    """Part of the step. Beyond the first time, to know and to win what is left is worth no more than that."""
    untied_near: float = 0.015
    """Part of the step: as much may be won by what ties keep alike."""
    untied_pairs: int = 30_000_000
    """Pairs. Beyond so many, the tables of the problem with every layer by itself take gigabytes."""
    unmeant_gather: float = 100.0
    """Times its seconds that a gather counts where a method of the papers means none: dear enough that it is taken only where
    nothing else is possible, as in models not written for the method."""
    fused_latency: float = 0.1
    """Part of its latency that a small collective bears where others like it are ready too: about ten are sent as one, as
    long as no program has shown how many are."""

    # The integer program

    fold_elements: int = 40_000_000
    """Elements of the largest table [u, node, v] that folds a node with two neighbours: 320 MB of float64."""
    equal_edges: int = 300
    """Edges from which on equal tables are looked for: of fewer, each is computed by itself."""
    compared_choices: int = 400_000
    """Comparisons of a node's choices with each other, beside all choices of its neighbours, at most; a node with more keeps
    those that others dominate."""
    message_rounds: tuple[int, ...] = (60, 120, 200)
    """Rounds of message passing before each attempt of the ILP: more each time, for what is left is harder."""
    message_sweeps: int = 8
    """Sweeps forth and back over the nodes at the end, which pick the choices that the bound suggests."""
    message_stalled: float = 0.02
    """Part of what is missing to the best answer. Where ten rounds raise the bound by less, more are not worth their time."""
    message_look: int = 10
    """Rounds between looks at how far the ascent has come."""
    message_small: int = 4_096
    """Pairs. Of tables of fewer the columns of all widths are computed at once."""
    message_chunk: int = 200_000
    """Entries of tables that are computed at once: 1.6 MB of float64, which stay in a core's cache."""
    message_call_seconds: float = 1.6e-5
    """Seconds for each level of nodes and each array of tables of a round, forth and back, roughly."""
    message_pair_seconds: float = 8e-9
    """And for each pair of a round."""
    solver_pairs_per_second: float = 3.5e4
    """Pairs of what is left for the ILP that its solver gets through in a second, roughly."""
    rough_gap: float = 1e-2
    """Part of the cost. Where so much may be left, what message passing has found at its first attempt is taken."""
    small_core: int = 60_000
    """Pairs. The ILP gets all of a problem that has no more, and proves its answer least."""
    early_core: int = 5_000
    """Pairs. Where more rounds of message passing can still narrow the problem, the ILP gets no more than so many."""
    large_core: int = 500_000
    """Pairs. Beyond so many (meshes of three axes, large models without equal layers) a small gap is left as it is: the ILP
    would take its whole time limit."""
    large_gap: float = 2e-3
    """Part of the cost: that gap. It is also left where bytes have a price, and where what message passing leaves to the ILP
    has more than `early_core` pairs: to prove the last of it may take half a minute."""
    promising_choices: int = 8
    """Choices of a node, at most, that the ILP gets of a larger core, beside those around the best answer known."""
    fewer_choices: tuple[int, ...] = (8, 4, 2)
    """Choices of a node that are taken, one number after the other, where more would be too many for the ILP."""
    room_parts: tuple[float, ...] = (1 / 32, 1 / 8, 1)
    """Parts of the room between the bounds: first the choices that exceed the bound least, whose best narrows the room."""
    first_slack: float = 2e-3
    """Part of the cost, by which these first ones exceed the bound at most."""
    polish_nodes: tuple[int, ...] = (24, 80)
    """Nodes of a neighbourhood in which everything is chosen anew, in one round after the other: small ones first."""
    polish_rounds: int = 3
    """Rounds at most."""
    polish_gain: float = 1e-4
    """Part of the cost. A round that wins less is the last."""
    polish_pairs: int = 40_000
    """Pairs of a neighbourhood with memory rows, which no elimination makes smaller: larger ones are left out."""
    polish_node_seconds: float = 1.3e-3
    """Seconds for each node of a problem, roughly."""
    polish_core: int = 1_000
    """Pairs that elimination may leave of a neighbourhood for the solver."""
    axis_gain: float = 1e-4
    """Part of the cost. Where holding any one axis wins less than that, an answer on three axes is taken."""
    search_steps: int = 50
    """Steps for each node of the searches that prove nothing (`solver="mcmc"` and others)."""

    # Memory

    memory_rows: int = 8
    """Moments of a program over budget that become rows of the problem at once."""
    peak_fallen: float = 0.99
    """Part of a peak. Where memory has fallen below, the next peak is another one, and may become a row of its own."""
    floor_moments: int = 4
    """Moments of each body, the fullest, of which the bytes that every sharding needs are proved."""
    rows_core: int = 10_000
    """Pairs. A problem with no more is solved with its memory rows as they are; in others bytes get a price first."""
    prices: int = 10
    """Prices on a byte that are tried at most."""
    cutting_planes: int = 30
    """Times that a problem within a memory budget is solved with the rows that its answer breaks."""
    price_step: float = 4.0
    """From one price to the next, until everything fits: ten of them span a factor of a million."""
    price_mixes: int = 2
    """Times that rows choose among what was found at the different prices."""
    price_tries: int = 2
    """Times that all this is done again with the rows that were found on the way."""
    far_over: float = 1.5
    """Times the budget: what the rows of a large problem need beyond that is not tried to be kept in spite of them."""
    dear_bytes: float = 100.0
    """Times all seconds: what the bytes over budget cost where any sharding that fits is welcome."""

    made_of: int = 8
    """What is made of more values than these by operations that compilers fuse goes through memory in the prices of kernels."""
    made_of_bytes: float = 1.25
    """Times the bytes of a value: so large may be what it is made of if each kernel that reads it recomputes it."""
    slow_flops: float = 16.0
    """Operations for each element: what takes more is held if several read it, as random bits are."""
    late_bytes: int = 1 << 22
    """Bytes. What is smaller may live through a loop; of what is larger, what frees it is done before."""
    again_bytes: int = 1 << 20
    """Bytes. What is smaller may live beside what is recomputed."""
    large_part: float = 1 / 8
    """Part of the largest array of a body. What makes one as large waits for what frees others."""
    late_part: float = 1 / 8
    """Part of the bytes that become free. What is made to wait for that has no more: to wait may cost a pass over it."""
    fitting_turns: int = 8
    """Plans that are made and compiled, at most, until the compiler agrees that one fits."""

    # The clock

    exposure_turns: int = 3
    """Problems that are solved on a mesh, each with what the answer before showed to be exposed."""
    around_turns: int = 5
    """The same around the best answer of a mesh, as long as its gap is more than `rough_gap`."""
    exposure_same: float = 5e-3
    """Part of the step. Up to that it takes as long as was thought, and is not solved again: 0.2 % of a step for about a
    second of planning."""
    known_far: float = 0.01
    """Part of the step. A known plan that is thought to take so much longer than the best one is not looked at."""
    loop_turns: int = 3
    """Turns of a loop that are put on the clock; each further one takes as long as the last of these."""

    # Stages

    max_segments: int = 256
    """Places at which a step may be cut, at most: the sums over pairs of them stay small."""
    shared_elements: int = 4096
    """Elements. What has no more may be held by every stage, and crosses no border."""
    repeated_work: float = 1e-3
    """Part of the whole work. An equation of at most that may be repeated in every stage that needs it."""
    around_border: int = 4
    """Operations before and after a place that tell what kind of place it is: layers are to be cut at equal ones."""
    odd_border: float = 5e-3
    """What a border at an odd place costs beside the bytes over the fullest border: only ties are broken by it."""
    uneven_work: float = 1e-3
    """What uneven work costs beside these bytes: the next tie."""
    beside_layer: float = 1.05
    """Times the work of a segment that is a layer by itself: so much may a layer have that holds it."""
    joined_elements: int = 16
    """Elements. What has no more is joined across stages element by element: norms, flags, counters."""
    copied_elements: int = 1024
    """Elements. What is made of arguments with no more is made wherever it is read: learning rates, random keys."""
    parts_of_memory: int = 64
    """Each of several stages on one mesh has so many of such parts of its memory: what is finer tells equal stages apart."""
    recompute_levels: int = 6
    """Levels of recomputation of a stage that are told apart, at most: each is lowered and simulated."""
    uneven_stage: float = 1.5
    """Equal shares of the work. A stage with more makes a pipeline that is none, of which the user is warned."""
    most_parts: int = 16
    """Parts that scans over layers are taken into so that stages are even: each is a loop of its own to compile."""
    parts_tolerance: float = 0.05
    """Part of the largest stage: how far it may be over the least that finer parts would make it."""
    stage_gap: float = 3e-3
    """Part of its cost by which the sharding of a stage may miss the least: the last of it would take most of the time. Where
    message passing comes no nearer than to `rough_gap`, and what it leaves is large, that is left too."""
    hand_gap: float = 1e-5
    """The same for a method of the papers: no collective more or less than theirs, however little it costs."""
    layer_gap: float = 1e-2
    """The same for layers of the table, which only choose stages."""
    one_array: float = 0.02
    """Part of its time that a stage may lose so that its part of a stack lies like the others: the user then has one array."""
    near: float = 0.05
    """What cannot be faster than what is known by more than this part is not worth solving under a memory budget;
    stages of more than `small_core` pairs may show that while they are solved."""
    microbatches_per_stage: int = 4
    """Microbatches for each stage where the user names no number: the bubble of 1F1B is then at most a fifth."""

    # The search

    meshes_share: float = 0.4
    """Part of the time to plan everything that meshes without stages take; for progress."""
    layers_share: float = 0.4
    """Part of the search over pipelines that costs of layers take; for progress."""
    third_axis_equations: int = 8000
    """Of a step. One with more is not sharded over three axes where nothing fits on two: microbatches are tried instead."""
    third_axis_gain: float = 1e-3
    """Part of the step that the second axis must have won, for the third wins less, and takes several times as long to plan."""
    nodes_per_second: float = 1e3
    """Nodes of a problem that planning of a mesh gets through in a second on one core, roughly."""
    pairs_per_second: float = 2.5e6
    """And pairs."""
    solve_share: float = 1 / 3
    """Part of that which one solve takes, roughly."""
    repaying_steps: int = 10_000
    """Steps of training. A step of planning may take as long as what it may win in so many."""
    hoped: float = 0.25
    """Part of what lies between the best that is known and what nothing beats: so much is thought to be won of it."""
    stages_seconds: float = 25.0
    """Seconds that a search for stages takes, roughly, if it takes long: how many pipelines are planned is bounded."""
    stages_solves: float = 8.0
    """Times what it takes to shard the step on one mesh that a search for stages takes otherwise, roughly."""
    clock_doubt: float = 5e-3
    """Part of the cost that a mesh may be priced above the best so far and still be faster on the clock. Problems of no more
    than `small_mesh_pairs` are solved to see."""
    small_mesh_pairs: int = 1_000_000
    """Pairs: half a second. Meshes with no more of them are planned whatever they may win."""
    accumulation_bytes: float = 0.1
    """Part of the bytes needed that twice as many microbatches must save, where nothing fits yet."""
    exposure_guessed: float = 0.05
    """Part of the step. Before a number of microbatches is put on the clock, what is exposed is guessed from another number:
    a problem whose least cost is larger than the best step by more is given up."""
    accumulation_meshes: int = 3
    """Meshes that are tried in microbatches: the best of those that were tried without."""
    stages_gain: float = 0.1
    """Part of the best step without stages. Within one host stages are tried if so much can be won: less is eaten up by
    their bubble."""
    table_layers: int = 16
    """Equal layers of which each has a share of the work; more parts of a scan than these are interpolated."""
    layer_slack: float = 0.35
    """Part of an even layer by which layers may be uneven, so that more of them are equal, and are sharded once."""
    fewest_microbatches: int = 4
    """Microbatches of a pipeline that are tried, at least, if the batch divides so."""
    most_microbatches: int = 128
    """And at most."""
    few_microbatches: tuple[int, ...] = (1, 2)
    """Such numbers as well where there is no backward pass: then the pipeline fills at once."""
    guesses_solved: int = 12
    """Times, at most, that layers are sharded for a candidate: for its number of microbatches, where scaling only guesses, or
    within memory, where they do not fit as they were first sharded."""
    finalists: int = 2
    """Pipelines of the table that are planned as they are, at least."""
    most_finalists: int = 16
    """And at most, of small programs."""
    roomy_finalists: int = 8
    """To so many finalists comes one that would be faster and does not fit by the table."""
    finalist_equations: int = 6000
    """As many finalists as so many equations allow, each counting the program's."""
    table_doubt: float = 0.1
    """The table may be wrong by this part: what it says to take longer at least than the best step by more is left out."""
    generous: float = 4.0
    """Where no step is known that fits: no stage takes so many times as long as if all devices shared all work evenly."""
    much_waiting: float = 0.03
    """Part of the step. Where devices wait longer, the schedules that send or keep more for it are tried too."""
    bubble_left: float = 0.5
    """Part of 1F1B's bubble that these schedules leave."""
    calls_in_a_row: int = 64
    """Calls that stand for many: where calls do not wait for each other, a pipeline fills once for all of them."""


TUNING = Tuning()
