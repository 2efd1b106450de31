"""The checks of training that every rank runs: equal to one process with the data of all ranks."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm._adapter.submit import record_cause
from ringcomm.errors import MismatchError, PeerLostError
from tests.adapters.jobs import close, numbers, same_everywhere, warned_about_different_weights
from tests.adapters.tensorflow.modes import MODES, session_of_a_graph
from tests.support.errors import raises

tf1 = tf.compat.v1

ROWS = 12
"""Of all ranks together; 1 to 4 ranks get equally many."""


def data(salt: int) -> Any:
    return numbers(0, (ROWS, 5), np.float32, salt), numbers(1, (ROWS, 2), np.float32, salt)


def mine(array: Any) -> Any:
    share = ROWS // hvd.size()
    return array[hvd.rank() * share : (hvd.rank() + 1) * share]


def start() -> List[Any]:
    return [numbers(0, (5, 4), np.float32, 1) / 10, numbers(0, (4, 2), np.float32, 2) / 10]


def loss_of(weights: Any, inputs: Any, targets: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(inputs, weights[0])), weights[1]) - targets))


def alone(steps: int, rate: float) -> List[Any]:
    """Return what one process with all the data comes to, by gradient descent."""
    weights = [tf.Variable(item) for item in start()]
    for step in range(steps):
        inputs, targets = data(100 + step)
        with tf.GradientTape() as tape:
            loss = loss_of(weights, inputs, targets)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(rate * gradient)
    return [weight.numpy() for weight in weights]


def check_the_tape() -> None:
    expected = alone(5, 0.1)
    for in_function in (False, True):
        for options in ({}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}, {"sparse_as_dense": True}):
            weights = [tf.Variable(item, name=f"w{at}") for at, item in enumerate(start())]
            # Every rank lists its variables in another order: they are matched by their names.
            order = weights if hvd.rank() % 2 or "num_groups" in options else weights[::-1]

            def step(inputs: Any, targets: Any, weights=weights, order=order, options=options) -> None:  # type: ignore[no-untyped-def]
                with tf.GradientTape() as tape:
                    loss = loss_of(weights, inputs, targets)
                tape = hvd.DistributedGradientTape(tape, **options)
                for weight, gradient in zip(order, tape.gradient(loss, order)):
                    weight.assign_sub(0.1 * gradient)

            run = tf.function(step) if in_function else step
            for number in range(5):
                run(*(tf.constant(mine(item)) for item in data(100 + number)))
            for weight, wanted in zip(weights, expected):
                np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-5, atol=1e-6)
                same_everywhere(weight.numpy())


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
    for in_function in (False, True):

        def train(name: str, added: int, in_function: bool = in_function) -> None:
            name += str(in_function)
            weights = [tf.Variable(item + added, name=f"{name}{at}") for at, item in enumerate(start())]

            def step(inputs: Any, targets: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = loss_of(weights, inputs, targets)
                for weight, gradient in zip(
                    weights, hvd.DistributedGradientTape(tape).gradient(loss, weights)
                ):
                    weight.assign_sub(0.1 * gradient)

            run = tf.function(step) if in_function else step
            for _ in range(6):
                run(*map(tf.constant, data(1)))

        warned_about_different_weights(train)


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
        raises(NotImplementedError, lambda: tape.gradient(loss, table), "not reduced by Adasum: use sparse")
    tape, loss = recorded(op=hvd.Adasum, sparse_as_dense=True)
    assert tape.gradient(loss, table).shape == (4, 2)


def check_optimizers_of_version_1() -> None:
    for passes in (1, 2):
        expected = alone(6, 0.1) if passes == 1 else accumulated(6, 0.1)
        with session_of_a_graph() as session:
            weights = [tf1.get_variable(f"w{at}", initializer=item) for at, item in enumerate(start())]
            inputs, targets = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.float32, [None, 2])
            optimizer = hvd.DistributedOptimizer(
                tf1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=passes,
                average_aggregated_gradients=True,
            )  # fmt: skip
            train = optimizer.minimize(loss_of(weights, inputs, targets))
            session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
            for step in range(6):
                x, y = data(100 + step)
                session.run(train, {inputs: mine(x), targets: mine(y)})
            for weight, wanted in zip(session.run(weights), expected):
                np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


def check_that_optimizers_of_one_graph_accumulate_apart() -> None:
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


def accumulated(steps: int, rate: float) -> List[Any]:
    """Like :func:`alone`, with a step for every two batches."""
    weights = [tf.Variable(item) for item in start()]
    for step in range(0, steps, 2):
        totals = [0.0, 0.0]
        for number in (step, step + 1):
            inputs, targets = data(100 + number)
            with tf.GradientTape() as tape:
                loss = loss_of(weights, inputs, targets)
            totals = [total + item for total, item in zip(totals, tape.gradient(loss, weights))]
        for weight, total in zip(weights, totals):
            weight.assign_sub(rate * total / 2)
    return [weight.numpy() for weight in weights]


def check_monitored_session_with_an_embedding() -> None:
    """The hook, a sparse gradient, Adagrad, and two optimizers without an order between them."""
    with tf.Graph().as_default():
        tf1.set_random_seed(hvd.rank())
        table = tf1.get_variable("table", [6, 3])
        weights = tf1.get_variable("weights", [3, 1])
        ids = tf1.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(table, ids), weights) - 1.0))
        one = hvd.DistributedOptimizer(tf1.train.AdagradOptimizer(0.3))
        two = hvd.DistributedOptimizer(tf1.train.AdagradOptimizer(0.1), sparse_as_dense=True)
        step = tf1.train.get_or_create_global_step()
        train = tf.group(
            one.minimize(loss, global_step=step, var_list=[table]), two.minimize(loss, var_list=[weights])
        )
        hooks = [hvd.BroadcastGlobalVariablesHook(0), tf1.train.StopAtStepHook(last_step=40)]
        losses = []
        with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                _, found, state = session.run([train, loss, [table, weights]], {ids: [hvd.rank() % 6, 5]})
                losses.append(found)
        assert losses[-1] < losses[0] / 2
        same_everywhere(np.concatenate([np.ravel(item) for item in state]))


def check_keras_optimizers_are_taken_too() -> None:
    weights = [tf.keras.Variable(item) for item in start()]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    optimizer.build(weights)
    for step in range(5):
        inputs, targets = (tf.constant(mine(item)) for item in data(100 + step))
        with tf.GradientTape() as tape:
            loss = loss_of([weight.value for weight in weights], inputs, targets)
        optimizer.apply_gradients(zip(tape.gradient(loss, [weight.value for weight in weights]), weights))
    for weight, wanted in zip(weights, alone(5, 0.1)):
        np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-5, atol=1e-6)


def check_sync_batch_normalization() -> None:
    """Output, moving averages and gradients are those of the whole batch."""
    whole = numbers(0, (ROWS, 3), np.float32, 50) + 10
    factors = numbers(1, (ROWS, 3), np.float32, 51)
    plain = tf.keras.layers.BatchNormalization()
    plain.build(whole.shape)
    with tf.GradientTape() as tape:
        place = tf.constant(whole)
        tape.watch(place)
        expected = plain(place, training=True)
        loss = tf.reduce_sum(expected * factors)
    wanted = tape.gradient(loss, [place, plain.gamma.value])
    for mode in MODES[:2]:
        layer = hvd.SyncBatchNormalization()
        layer.build(whole.shape)

        def function(inputs: Any, layer=layer) -> Any:  # type: ignore[no-untyped-def]
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                output = layer(inputs, training=True)
                loss = tf.reduce_sum(output * mine(factors))
            return [output, *tape.gradient(loss, [inputs, layer.gamma.value])]

        output, gradient, of_gamma = mode(function, [mine(whole)])
        np.testing.assert_allclose(output, mine(expected.numpy()), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient, mine(wanted[0].numpy()), rtol=1e-3, atol=1e-3)
        total = hvd.allreduce(tf.constant(of_gamma), op=hvd.Sum).numpy()
        np.testing.assert_allclose(total, wanted[1].numpy(), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(layer.moving_variance.numpy(), plain.moving_variance.numpy(), rtol=1e-4)
        np.testing.assert_allclose(layer.moving_mean.numpy(), plain.moving_mean.numpy(), rtol=1e-4)


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

    @hvd.elastic.run
    def goes_wrong(state: Any) -> None:
        raise tf.errors.UnknownError(None, None, "another mistake")

    raises(tf.errors.UnknownError, lambda: goes_wrong(state), "another mistake")
