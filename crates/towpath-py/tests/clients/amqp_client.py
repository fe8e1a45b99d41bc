"""pika: messages with properties through a queue, got one by one and pushed, with confirms; two channels; bodies of several frames."""

import sys

import pika


def get_all(channel, count):
    for number in range(count):
        found, properties, body = channel.basic_get("queue")
        assert body == b"body %d" % number and found.message_count == count - 1 - number, (number, body)
        assert (properties.headers, properties.content_type) == ({"number": number}, "text/plain")
        channel.basic_ack(found.delivery_tag)
    assert channel.basic_get("queue") == (None, None, None)


def publish(channel, bodies):
    for number, body in enumerate(bodies):
        properties = pika.BasicProperties(headers={"number": number}, content_type="text/plain")
        channel.basic_publish("", "queue", body, properties)


def consume(channel, bodies):
    taken = []
    for found, properties, body in channel.consume("queue"):
        taken.append(body)
        assert properties.headers == {"number": len(taken) - 1}
        channel.basic_ack(found.delivery_tag)
        if len(taken) == len(bodies):
            break
    assert taken == bodies
    assert channel.cancel() == 0


def main(port):
    parameters = pika.ConnectionParameters("127.0.0.1", port, socket_timeout=60, blocked_connection_timeout=60)
    one, two = pika.BlockingConnection(parameters), pika.BlockingConnection(parameters)
    channel, sure, other = one.channel(), one.channel(), two.channel()
    assert channel.queue_declare("queue").method.message_count == 0
    publish(channel, [b"body %d" % number for number in range(200)])
    # Messages of one connection are in the order of its frames; the next call follows them.
    assert channel.queue_declare("queue").method.message_count == 200
    get_all(other, 200)
    sure.confirm_delivery()
    bodies = [b"", b"x" * 4088, b"y" * 4089, bytes(range(256)) * 2000] + [b"%d" % number for number in range(300)]
    publish(sure, bodies)
    consume(other, bodies)
    for connection in (one, two):
        connection.close()
    print("ok")


main(int(sys.argv[1]))
