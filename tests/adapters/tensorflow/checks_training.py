"""What every rank checks about training with TensorFlow: the loss curve is that of one process."""

from __future__ import annotations

from typing import Any, Callable, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm._adapter.submit import record_cause
from ringcomm.errors import MismatchError, PeerLostError
from tests.adapters import contract, digits
from tests.adapters.jobs import close, numbers, same_everywhere, warned_about_different_weights
from tests.adapters.tensorflow.modes import MODES, session_of_a_graph
from tests.support.errors import raises

tf1 = tf.compat.v1


def network(seed: int = 0, name: str = "digits", make: Any = tf.Variable) -> List[Any]:
    return [make(array, name=f"{name}{place}") for place, array in enumerate(digits.weights(seed))]


def loss_of(weights: Any, images: Any, labels: Any) -> Any:
    first, bias, second, bias_2 = weights
    scores = tf.nn.relu(images @ first + bias) @ second + bias_2
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def check_tapes_have_the_loss_curve_of_one_process() -> None:
    for compiled in (True, False):
        for options in ({}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}, {"sparse_as_dense": True}):
            weights = network(hvd.rank())
            hvd.broadcast_variables(weights, root_rank=0)
            momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
            # Every rank lists its variables in another order: they are matched by their names.
            turn = -1 if hvd.rank() % 2 and "num_groups" not in options else 1

            def step(images: Any, labels: Any, weights=weights, momenta=momenta, options=options, turn=turn):  # type: ignore[no-untyped-def]
                with tf.GradientTape() as tape:
                    loss = loss_of(weights, images, labels)
                found = hvd.DistributedGradientTape(tape, **options).gradient(loss, weights[::turn])[::turn]
                for weight, momentum, gradient in zip(weights, momenta, found):
                    momentum.assign(digits.MOMENTUM * momentum - digits.LEARNING_RATE * gradient)
                    weight.assign_add(momentum)
                return loss

            run = tf.function(step) if compiled else step
            digits.check_curve(hvd, lambda *arrays, run=run: float(run(*map(tf.constant, arrays))))
            for weight in weights:
                same_everywhere(weight.numpy())


def check_optimizers_of_version_1_have_the_loss_curve_of_one_process() -> None:
    """With two passes per step each takes half of the samples."""
    for passes in (1, 2):
        with session_of_a_graph() as session:
            weights = network(0, make=lambda array, name: tf1.get_variable(name, initializer=array))
            images, labels = tf1.placeholder(tf.float32, [None, 64]), tf1.placeholder(tf.int64, [None])
            optimizer = hvd.DistributedOptimizer(
                tf1.train.MomentumOptimizer(digits.LEARNING_RATE, digits.MOMENTUM),
                backward_passes_per_step=passes, average_aggregated_gradients=True,
            )  # fmt: skip
            loss = loss_of(weights, images, labels)
            train = optimizer.minimize(loss)
            session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])

            def step(x: Any, y: Any) -> float:
                parts = zip(np.split(x, passes), np.split(y, passes))  # noqa: B023
                feeds = [{images: part, labels: right} for part, right in parts]  # noqa: B023
                return float(np.mean([session.run([loss, train], feed)[0] for feed in feeds]))  # noqa: B023

            digits.check_curve(hvd, step)


def check_the_tape_takes_what_there_is() -> None:
    """Sparse gradients, absent ones, nested sources, and such as belong to one rank alone."""
    table, unused, local = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        rows = tf.gather(table, [hvd.rank() % 4])
        loss = tf.reduce_sum(rows) * local
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(local)
    found = tape.gradient(loss, {"table": table, "rest": [unused, local]})
    assert isinstance(found["table"], tf.IndexedSlices) and found["rest"][0] is None
    expected = np.zeros((4, 2))
    for rank in range(hvd.size()):
        expected[rank % 4] += 2 / hvd.size()
    close(tf.convert_to_tensor(found["table"]).numpy(), expected)
    close(found["rest"][1].numpy(), 2.0 / hvd.size())
    sparse_gradients_of_other_kinds(table)
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build((None, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2]))) * (hvd.rank() + 1)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
    (own,) = tape.gradient(loss, layer.trainable_weights)
    close(own.numpy(), np.full((2, 1), hvd.rank() + 1))


def sparse_gradients_of_other_kinds(table: Any) -> None:
    """Those of a local table are scaled and stay; Adasum has no meaning for rows."""

    def recorded(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank() % 4]))
        return hvd.DistributedGradientTape(tape, **options), loss

    tape, loss = recorded()
    tape.register_local_source(table)
    own = tape.gradient(loss, table)
    assert isinstance(own, tf.IndexedSlices) and own.indices.numpy().tolist() == [hvd.rank() % 4]
    close(own.values.numpy(), np.full((1, 2), 1.0 / hvd.size()))
    tape, loss = recorded(op=hvd.Adasum)
    if hvd.size() > 1:
        raises(NotImplementedError, lambda: tape.gradient(loss, table), "use sparse_as_dense=True")
    tape, loss = recorded(op=hvd.Adasum, sparse_as_dense=True)
    assert tape.gradient(loss, table).shape == (4, 2)


def check_a_rank_without_a_gradient_is_a_mismatch_in_that_step() -> None:
    """Otherwise its next reduction of the same name would be matched with one of others' earlier step."""
    table, other = tf.Variable(tf.ones([4, 2]), name="table"), tf.Variable(2.0, name="other")

    def reduced(uses_table: bool, uses_other: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.constant(1.0)
            if uses_table:
                loss *= tf.reduce_sum(tf.gather(table, [1]))
            if uses_other:
                loss *= other
        return hvd.DistributedGradientTape(tape).gradient(loss, [table, other])

    is_first = hvd.rank() == 0
    for mine in ((is_first, True), (True, is_first), (is_first, is_first)) if hvd.size() > 1 else ():
        raises(MismatchError, lambda mine=mine: reduced(*mine), "without ")  # type: ignore[misc]
    assert reduced(False, False) == [None, None]


def check_ranks_that_begin_with_different_weights() -> None:
    for wrap in (tf.function, lambda function: function):

        def train(name: str, added: int, wrap: Callable[[Any], Any] = wrap) -> None:
            weights = [tf.Variable(tf.ones(3) + added, name=f"{name}{wrap is tf.function}")]

            @wrap
            def step() -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weights[0])
                return hvd.DistributedGradientTape(tape).gradient(loss, weights)

            for _ in range(6):
                step()

        warned_about_different_weights(train)


def check_optimizers_of_one_graph_accumulate_apart() -> None:
    """As the two of a GAN do."""
    with session_of_a_graph() as session:
        weights = [tf1.get_variable(f"w{at}", initializer=tf.constant(0.0)) for at in range(2)]
        trains = [
            hvd.DistributedOptimizer(
                tf1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
            ).apply_gradients([(tf.constant(10.0**at), weight)])
            for at, weight in enumerate(weights)
        ]
        session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
        for _ in range(2):
            for train in trains:
                session.run(train)
        assert session.run(weights) == [-2.0, -20.0]


def check_a_process_set_trains_without_the_other_ranks() -> None:
    if hvd.size() == 1:
        return
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    wanted = sum(even.ranks) / even.size() if even.included() else float(hvd.rank())
    variable = tf.Variable(float(hvd.rank()))
    with tf.GradientTape() as tape:
        loss = variable * variable
    (found,) = hvd.DistributedGradientTape(tape, process_set=even).gradient(loss, [variable])
    np.testing.assert_allclose(found.numpy(), 2 * wanted)
    hvd.barrier()
    assert hvd.remove_process_set(even)


def check_sync_batch_normalization() -> None:
    """Output, moving averages and gradients are those of the whole batch."""
    whole = numbers(0, (12, 3), np.float32, 50) + 10
    factors = numbers(1, (12, 3), np.float32, 51)
    mine = slice(hvd.rank() * 12 // hvd.size(), (hvd.rank() + 1) * 12 // hvd.size())

    def computed(layer: Any, inputs: Any, factors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(inputs, training=True)
            loss = tf.reduce_sum(output * factors)
        return [output, *tape.gradient(loss, [inputs, layer.gamma.value])]

    plain = tf.keras.layers.BatchNormalization()
    plain.build(whole.shape)
    wanted = [item.numpy() for item in computed(plain, tf.constant(whole), factors)]
    for mode in MODES[:2]:
        layer = hvd.SyncBatchNormalization()
        layer.build(whole.shape)
        output, gradient, of_gamma = mode(
            lambda inputs, layer=layer: computed(layer, inputs, factors[mine]), [whole[mine]]
        )
        np.testing.assert_allclose(output, wanted[0][mine], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient, wanted[1][mine], rtol=1e-3, atol=1e-3)
        total = hvd.allreduce(tf.constant(of_gamma), op=hvd.Sum).numpy()
        np.testing.assert_allclose(total, wanted[2], rtol=1e-3, atol=1e-3)
        for name in ("moving_mean", "moving_variance"):
            np.testing.assert_allclose(getattr(layer, name).numpy(), getattr(plain, name).numpy(), rtol=1e-4)


def check_elastic_states_of_variables() -> None:
    """Eagerly and in a session: rank 0 decides, and what was committed comes back."""
    rank = float(hvd.rank())
    own = tf.Variable(rank)
    eagerly = hvd.elastic.TensorFlowState(variables=[own], epoch=hvd.rank())
    kept_and_restored(eagerly, own.numpy, own.assign)
    with session_of_a_graph() as session:
        variable = tf1.get_variable("counted", initializer=rank)
        place = tf1.placeholder(tf.float32, [])
        assign = variable.assign(place)
        session.run(tf1.global_variables_initializer())
        with session.as_default():
            state = hvd.elastic.TensorFlowState(epoch=hvd.rank())
        session.graph.finalize()
        kept_and_restored(
            state, lambda: session.run(variable), lambda value: session.run(assign, {place: value})
        )


def kept_and_restored(state: Any, read: Any, assign: Any) -> None:
    state.sync()
    assert (read(), state.epoch) == (0.0, 0)
    assign(5.0)
    state.epoch = 1
    state.commit()
    assign(7.0)
    state.epoch = 2
    state.restore()
    assert (read(), state.epoch) == (5.0, 1)


def check_elastic_training_goes_on_after_a_loss_inside_a_graph() -> None:
    """TensorFlow reports the error of a collective in a graph as an error of its own, with the text."""
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
    without_weights = tf.keras.Sequential([tf.keras.layers.Dense(2)])
    raises(ValueError, lambda: hvd.elastic.TensorFlowKerasState(without_weights), "built")
    model.compile(tf.keras.optimizers.Adam(0.1), loss="mse")
    state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
    begun: List[Any] = []

    @tf.function
    def collective() -> Any:
        return tf.numpy_function(fails, [], tf.float32)

    def fails() -> Any:
        error = PeerLostError("rank 5 (jetson5) was lost while others were in allreduce")
        record_cause(error)
        record_cause(PeerLostError("what another callback reads is another error"))
        raise error

    @hvd.elastic.run
    def train(state: Any) -> str:
        begun.append(state.epoch)
        same_everywhere(np.concatenate([np.ravel(item) for item in model.get_weights()]))
        if len(begun) > 1:
            np.testing.assert_array_equal(model.get_weights()[1], [0, 0])
            return "done"
        state.epoch = 9
        model.layers[0].bias.assign([1.0, 2.0])
        collective()
        raise AssertionError("it goes on after a loss")

    assert train(state) == "done" and begun == [0, 0]


# ---- compression -----------------------------------------------------------------------------


def reducer(compression: Any, compiled: bool, name: str = "coded") -> Callable[[Any], Any]:
    """Return a function that reduces a gradient, with a new tape for every step."""
    variable, bias = tf.Variable(tf.zeros((64, 96)), name=name), tf.Variable(tf.zeros(9), name=f"{name}.bias")

    def compute(given: Any) -> Any:
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(variable * given) + tf.reduce_sum(bias)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, [variable, bias])[0]

    step = tf.function(compute) if compiled else compute
    reduced = lambda gradient: step(tf.constant(gradient)).numpy()  # noqa: E731
    reduced.variables = [variable, bias]  # type: ignore[attr-defined]
    return reduced


def check_what_codecs_lose_is_added_to_the_next_gradient() -> None:
    for compiled in (False, True):
        contract.check_error_feedback(lambda by: reducer(by, compiled), hvd.rank(), hvd.size())  # noqa: B023


def check_residuals_are_saved_and_loaded() -> None:
    """A run that goes on with saved residuals has the same bits as one that was not interrupted."""
    if hvd.size() == 1:
        return
    draws = [np.random.default_rng((step, hvd.rank())).normal(size=(64, 96)) for step in range(5)]
    given = [draw.astype(np.float32) for draw in draws]
    first, second, third = (reducer("int4", False) for _ in range(3))
    assert hvd.residual_state_dict(first.variables) == {}  # type: ignore[attr-defined]
    for gradient in given[:3]:
        first(gradient)
    saved = hvd.residual_state_dict(first.variables)  # type: ignore[attr-defined]
    assert len(saved) == 1 and max(np.abs(item).max() for item in saved.values()) > 1e-3
    hvd.load_residual_state_dict(second.variables, saved)  # type: ignore[attr-defined]
    ends = [[reduced(gradient).tobytes() for gradient in given[3:]] for reduced in (first, second, third)]
    assert ends[0] == ends[1] != ends[2]
    hvd.load_residual_state_dict(second.variables, {})  # type: ignore[attr-defined]
    assert not any(item.any() for item in hvd.residual_state_dict(second.variables).values())  # type: ignore[attr-defined]
