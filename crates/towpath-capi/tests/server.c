/* Tests framings, listeners, outbound connections, admission and events of towpath_mux. Reads cert.pem and key.pem of its directory. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <towpath.h>

static void check(int fits, const char *what)
{
    if (!fits) {
        fprintf(stderr, "server: %s: %s\n", what, towpath_error());
        exit(1);
    }
}
#define CHECK(what) check(what, #what)

static void says(int fd, const char *text)
{
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
}

static int attach(towpath_mux *mux, const towpath_framing *framing)
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK((framing == NULL ? towpath_mux_attach(mux, pair[0], NULL, NULL) : towpath_mux_attach_framed(mux, pair[0], framing, NULL)) == 0);
    close(pair[0]);
    return pair[1];
}

/* Waits for the next ended connection. */
static struct towpath_mux_ended ended(towpath_mux *mux)
{
    struct towpath_mux_ended end;
    int got;
    while ((got = towpath_mux_poll_ended(mux, &end)) == 0)
        poll(NULL, 0, 1);
    CHECK(got == 1 && end.text[0] != 0);
    return end;
}

static struct sockaddr_in loopback(unsigned port)
{
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static int to(unsigned port)
{
    struct sockaddr_in address = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* The first byte is the length of the rest, X announces another protocol, and ! is an error. */
struct counts {
    towpath_mux *mux;
    int calls, released;
};

static int64_t framer(const uint8_t *bytes, size_t len, struct towpath_framing_state *state, void *context)
{
    struct counts *counts = context;
    struct towpath_mux_counters counted;
    counts->calls++;
    CHECK(len >= 1 && state->need == 0 && state->skip == 0 && state->trim == 0 && state->hash == 0);
    CHECK(towpath_mux_counters(counts->mux, &counted) == -EDEADLK && towpath_mux_done(counts->mux) == -EDEADLK);
    CHECK(state->cb[4] == state->messages);
    if (bytes[0] == '!')
        return -EILSEQ;
    if (bytes[0] == 'X')
        return -ESTRPIPE;
    if (len < 2) {
        state->need = 2;
        return 0;
    }
    state->cb[4]++;
    state->skip = 1;
    state->mark = 7;
    state->hash = bytes[1];
    return 1 + bytes[0];
}

static void release(void *context)
{
    ((struct counts *)context)->released++;
}

static void functions(void)
{
    struct counts counts = {NULL, 0, 0};
    struct towpath_mux_options options;
    struct towpath_mux_message message;
    struct towpath_mux_ended end;
    towpath_framing *framing = NULL;
    char buffer[100];
    CHECK(towpath_framing_function(NULL, NULL, NULL, &framing) == -EINVAL);
    CHECK(towpath_framing_function(framer, NULL, NULL, NULL) == -EINVAL);
    CHECK(towpath_framing_function(framer, &counts, release, &framing) == 0);
    memset(&options, 0, sizeof options);
    options.order = TOWPATH_ORDER_KEY;
    options.message_max = 100;
    CHECK(towpath_mux_socket_framed(SOCK_DGRAM, NULL, 0, &options, &counts.mux) == -EINVAL);
    CHECK(towpath_mux_socket_framed(SOCK_DGRAM, framing, 0, &options, &counts.mux) == 0);
    towpath_framing_close(framing);
    int peer = attach(counts.mux, NULL);
    says(peer, "\5");
    says(peer, "hello\3you");
    CHECK(towpath_mux_recv(counts.mux, buffer, sizeof buffer, 0, &message) == 6 && memcmp(buffer, "\5hello", 6) == 0);
    CHECK(message.skip == 1 && message.trim == 0 && message.mark == 7 && message.hash == 'h');
    CHECK(towpath_mux_recv(counts.mux, buffer, sizeof buffer, 0, &message) == 4 && memcmp(buffer, "\3you", 4) == 0);
    CHECK(towpath_mux_done(counts.mux) == 0);
    says(peer, "!");
    end = ended(counts.mux);
    CHECK(end.cause == TOWPATH_END_MALFORMED && end.error == EILSEQ && end.fd == -1 && strstr(end.text, "returned") != NULL);
    CHECK(end.rest_len == 1 && end.rest[0] == '!' && end.unsent == 0);
    close(peer);
    peer = attach(counts.mux, NULL);
    says(peer, "X-protocol");
    end = ended(counts.mux);
    CHECK(end.cause == TOWPATH_END_GIVEN_BACK && end.error == 0 && end.fd >= 0 && end.rest_len <= 10);
    CHECK(memcmp(end.rest, "X-protocol", end.rest_len) == 0);
    says(end.fd, "raw");
    CHECK(read(peer, buffer, 3) == 3);
    close(end.fd);
    close(peer);
    /* A message above message_max. */
    peer = attach(counts.mux, NULL);
    says(peer, "\310long");
    CHECK(ended(counts.mux).cause == TOWPATH_END_TOO_BIG);
    close(peer);
    CHECK(counts.calls >= 5 && counts.released == 0);
    CHECK(towpath_mux_close(counts.mux, 10000) == 1);
    /* The mux's thread may still end. */
    while (*(volatile int *)&counts.released == 0)
        poll(NULL, 0, 1);
    CHECK(counts.released == 1);
}

static void framings(void)
{
    static const char program[] = "2\n48 0 0 0\n22 0 0 0\n"; /* the first byte is the length */
    towpath_framing *toml = NULL, *bpf = NULL, *text = NULL, *none = NULL;
    towpath_mux *mux;
    char buffer[100];
    CHECK(towpath_framing_toml("length = 9\n", &none) == -EINVAL && strstr(towpath_error(), "1:10:") != NULL);
    CHECK(towpath_framing_toml(NULL, &none) == -EINVAL && towpath_framing_toml("length = 1", NULL) == -EINVAL);
    CHECK(towpath_framing_parse("lime", &none) == -EINVAL && towpath_framing_parse(NULL, &none) == -EINVAL);
    CHECK(towpath_framing_program("2\n48 0 0 0\n", 11, NULL, &none) == -EINVAL && *towpath_error() != 0);
    CHECK(towpath_framing_program(NULL, 1, NULL, &none) == -EINVAL && none == NULL);
    CHECK(towpath_framing_toml("offset = 0\nlength = 1\nadjust = 1\n", &toml) == 0);
    CHECK(towpath_framing_program(program, strlen(program), NULL, &bpf) == 0);
    CHECK(towpath_framing_parse("line", &text) == 0);
    CHECK(towpath_mux_socket_framed(SOCK_DGRAM, toml, 0, NULL, &mux) == 0);
    CHECK(towpath_mux_attach_framed(mux, 0, NULL, NULL) == -EINVAL && towpath_mux_attach_framed(mux, -1, bpf, NULL) == -EBADF);
    struct {
        towpath_framing *framing;
        const char *bytes;
    } rows[] = {{NULL, "\2hi"}, {toml, "\2ho"}, {bpf, "\4and"}, {text, "a\n"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int peer = attach(mux, rows[i].framing), length = (int)strlen(rows[i].bytes);
        says(peer, rows[i].bytes);
        CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == length && memcmp(buffer, rows[i].bytes, (size_t)length) == 0);
        close(peer);
        CHECK(towpath_mux_done(mux) == 0 && ended(mux).cause == TOWPATH_END_CLEAN);
    }
    towpath_framing_close(toml);
    towpath_framing_close(bpf);
    towpath_framing_close(text);
    towpath_framing_close(NULL);
    CHECK(towpath_mux_close(mux, 10000) == 1);
}

/* Sends a line over a mux of clients, and answers it. */
static void exchange(towpath_mux *clients, towpath_mux *server, struct towpath_mux_message *message)
{
    char buffer[100];
    int sent;
    while ((sent = towpath_mux_send(clients, NULL, "hello\n", 6, 0)) == -ENOTCONN)
        poll(NULL, 0, 1);
    CHECK(sent == 6);
    CHECK(towpath_mux_recv(server, buffer, sizeof buffer, 0, message) == 6);
    CHECK(towpath_mux_send(server, NULL, "answer\n", 7, 0) == 7);
    CHECK(towpath_mux_recv(clients, buffer, sizeof buffer, 0, NULL) == 7 && memcmp(buffer, "answer\n", 7) == 0);
}

static void tls(void)
{
    struct towpath_tls_options of_server, of_client;
    struct towpath_connect_options how;
    struct towpath_connection_info info;
    struct towpath_mux_message message;
    struct towpath_mux_event event;
    towpath_mux *server, *clients;
    towpath_connector *connector = NULL;
    char address[40];
    uint16_t port;
    int got;
    memset(&of_server, 0, sizeof of_server);
    memset(&of_client, 0, sizeof of_client);
    memset(&how, 0, sizeof how);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", 0, &server) == 0);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", TOWPATH_CONNECTED, &clients) == 0);
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", NULL, &port) == -EINVAL);
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &of_server, &port) == -EINVAL && strstr(towpath_error(), "certificate") != NULL);
    of_server.certificate = "cert.pem";
    of_server.key = "missing.pem";
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &of_server, &port) == -EINVAL && strstr(towpath_error(), "missing.pem") != NULL);
    of_server.key = "key.pem";
    of_server.handshake_time = 60000;
    CHECK(towpath_mux_listen_tls(server, NULL, &of_server, &port) == -EINVAL);
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &of_server, &port) == 0);

    how.tls = &of_client;
    how.pause = how.pause_most = 1;
    snprintf(address, sizeof address, "127.0.0.1:%u", (unsigned)port);
    CHECK(towpath_mux_connect(clients, address, &how, NULL) == -EINVAL);
    of_client.roots = "cert.pem";
    CHECK(towpath_mux_connect(clients, NULL, &how, NULL) == -EINVAL);
    CHECK(towpath_mux_connect(clients, address, &how, &connector) == 0);
    exchange(clients, server, &message);
    CHECK(towpath_mux_connection_info(server, &message.connection, &info) == 0);
    CHECK(info.tls == 1 && info.starttls == 0 && strcmp(info.listener, address) == 0 && strncmp(info.peer, "127.0.0.1:", 10) == 0);
    CHECK(strcmp(info.local, address) == 0 && info.protocol[0] == 0 && info.client_names[0] == 0);
    towpath_connector_close(connector);
    towpath_connector_close(NULL);

    /* The client has no certificate. */
    of_server.client_ca = "missing.pem";
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &of_server, &port) == -EINVAL && strstr(towpath_error(), "missing.pem") != NULL);
    of_server.client_ca = "cert.pem";
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &of_server, &port) == 0);
    snprintf(address, sizeof address, "127.0.0.1:%u", (unsigned)port);
    CHECK(towpath_mux_connect(clients, address, &how, &connector) == 0);
    while ((got = towpath_mux_poll_event(server, &event)) == 0)
        poll(NULL, 0, 1);
    CHECK(got == 1 && event.kind == TOWPATH_ON_NOT_ATTACHED);
    towpath_connector_close(connector);
    while (towpath_mux_poll_event(server, &event) == 1)
        continue;

    /* Not TLS: an event, and no connection. */
    CHECK(towpath_mux_poll_event(server, NULL) == -EINVAL);
    int plain = to(port);
    says(plain, "this is not TLS\n");
    while ((got = towpath_mux_poll_event(server, &event)) == 0)
        poll(NULL, 0, 1);
    CHECK(got == 1 && event.kind == TOWPATH_ON_NOT_ATTACHED && event.text[0] != 0);
    CHECK(strncmp(event.peer, "127.0.0.1:", 10) == 0 && event.len == 0);
    close(plain);
    CHECK(towpath_mux_done(server) == 0 && towpath_mux_close(clients, 10000) == 1);
    ended(server);
    CHECK(towpath_mux_connection_info(server, &message.connection, &info) == -ENOENT);
    CHECK(towpath_mux_close(server, 10000) == 1);
}

static void copy(const char *from, const char *to)
{
    char buffer[8192];
    FILE *in = fopen(from, "r"), *out = fopen(to, "w");
    CHECK(in != NULL && out != NULL);
    size_t length = fread(buffer, 1, sizeof buffer, in);
    CHECK(length > 0 && length < sizeof buffer && fwrite(buffer, 1, length, out) == length);
    CHECK(fclose(in) == 0 && fclose(out) == 0);
}

/* A mux of clients that trust the certificate, until it has been served or refused. Returns 1 if it was served. */
static int is_trusted(towpath_mux *server, uint16_t port, const char *roots)
{
    struct towpath_tls_options tls = {.roots = roots, .name = "localhost"};
    struct towpath_connect_options how = {.tls = &tls, .pause = 1, .pause_most = 1};
    struct towpath_mux_message message;
    struct towpath_mux_event event;
    towpath_mux *clients;
    towpath_connector *connector;
    char address[40];
    int sent, served;
    snprintf(address, sizeof address, "127.0.0.1:%u", (unsigned)port);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", TOWPATH_CONNECTED, &clients) == 0);
    CHECK(towpath_mux_connect(clients, address, &how, &connector) == 0);
    while ((sent = towpath_mux_send(clients, NULL, "x\n", 2, 0)) == -ENOTCONN && towpath_mux_poll_event(clients, &event) == 0)
        poll(NULL, 0, 1);
    served = sent == 2;
    if (served) {
        char buffer[10];
        CHECK(towpath_mux_recv(server, buffer, sizeof buffer, 0, &message) == 2 && towpath_mux_done(server) == 0);
    }
    towpath_connector_close(connector);
    CHECK(towpath_mux_close(clients, 10000) == 1);
    return served;
}

/* A listener reads renewed certificates, and keeps the old ones if the new ones are invalid. */
static void reloads(void)
{
    struct towpath_tls_options tls = {.certificate = "now-cert.pem", .key = "now-key.pem"};
    towpath_mux *server;
    uint16_t port;
    copy("cert.pem", "now-cert.pem");
    copy("key.pem", "now-key.pem");
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", 0, &server) == 0);
    CHECK(towpath_mux_reload_tls(NULL) == -EINVAL && towpath_mux_reload_tls(server) == 0);
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &tls, &port) == 0);
    CHECK(is_trusted(server, port, "cert.pem") && !is_trusted(server, port, "other-cert.pem"));
    /* The certificate and the key do not match. */
    copy("other-cert.pem", "now-cert.pem");
    CHECK(towpath_mux_reload_tls(server) == -EINVAL && strstr(towpath_error(), "now-cert.pem") != NULL);
    CHECK(is_trusted(server, port, "cert.pem"));
    copy("other-key.pem", "now-key.pem");
    CHECK(towpath_mux_reload_tls(server) == 0);
    CHECK(!is_trusted(server, port, "cert.pem") && is_trusted(server, port, "other-cert.pem"));
    CHECK(towpath_mux_close(server, 10000) == 1);
}

/* An SMTP server that requires STARTTLS. The client is openssl, which ends with the answer in reply.txt. */
static void starttls(void)
{
    struct towpath_tls_options tls = {.certificate = "cert.pem", .key = "key.pem", .starttls = 1};
    struct towpath_connection_info info;
    struct towpath_mux_message message;
    towpath_mux *server;
    char buffer[100], command[200];
    uint16_t port;
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", 0, &server) == 0);
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &tls, &port) == -EINVAL && strstr(towpath_error(), "starttls") != NULL);
    CHECK(towpath_mux_close(server, 10000) == 1);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "smtp", 0, &server) == 0);
    CHECK(towpath_mux_listen_tls(server, "127.0.0.1:0", &tls, &port) == 0);
    snprintf(command, sizeof command,
             "(echo NOOP; cat hold) | openssl s_client -quiet -crlf -starttls smtp -CAfile cert.pem -connect 127.0.0.1:%u >reply.txt 2>&1", (unsigned)port);
    CHECK(system("rm -f hold; mkfifo hold") == 0);
    FILE *client = popen(command, "w");
    CHECK(client != NULL);
    FILE *hold = fopen("hold", "w");
    CHECK(hold != NULL);
    CHECK(towpath_mux_recv(server, buffer, sizeof buffer, 0, &message) == 6 && memcmp(buffer, "NOOP\r\n", 6) == 0);
    CHECK(towpath_mux_connection_info(server, &message.connection, &info) == 0 && info.tls == 1 && info.starttls == 1);
    CHECK(towpath_mux_send(server, NULL, "250 secret\r\n", 12, 0) == 12 && towpath_mux_done(server) == 0);
    while (system("grep -q '250 secret' reply.txt") != 0)
        poll(NULL, 0, 5);
    CHECK(fclose(hold) == 0 && towpath_mux_close(server, 10000) == 1);
    pclose(client);
}

static void unix_sockets(void)
{
    towpath_mux *server, *clients;
    struct towpath_mux_message message;
    struct towpath_connection_info info;
    char buffer[10];
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", 0, &server) == 0);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", TOWPATH_CONNECTED, &clients) == 0);
    CHECK(towpath_mux_listen_unix(server, NULL) == -EINVAL && towpath_mux_listen_unix(server, "no/such/path") == -ENOENT);
    CHECK(towpath_mux_listen_unix(server, "server.sock") == 0 && towpath_mux_listen_unix(server, "server.sock") == -EADDRINUSE);
    CHECK(towpath_mux_connect(clients, "unix:server.sock", NULL, NULL) == 0);
    exchange(clients, server, &message);
    CHECK(towpath_mux_connection_info(server, &message.connection, &info) == 0);
    CHECK(info.tls == 0 && strcmp(info.listener, "unix:server.sock") == 0);
    CHECK(towpath_mux_drain(server, -2) == -EINVAL && towpath_mux_drain(server, -1) == 0);
    CHECK(towpath_mux_recv(server, buffer, sizeof buffer, 0, NULL) == -ESHUTDOWN);
    CHECK(towpath_mux_close(clients, 10000) == 1 && towpath_mux_close(server, 10000) == 1);
}

/* One connection at a time. */
struct guests {
    int inside, gone, released;
};

static int admit(const char *remote, const char *local, void *context)
{
    struct guests *guests = context;
    CHECK(strncmp(remote, "127.0.0.1:", 10) == 0 && strncmp(local, "127.0.0.1:", 10) == 0 && strcmp(remote, local) != 0);
    if (guests->inside > 0)
        return guests->gone == 0 ? TOWPATH_ADMIT_RESET : TOWPATH_ADMIT_DENY;
    guests->inside++;
    return TOWPATH_ADMIT_PASS;
}

static void left(const char *remote, const char *local, void *context)
{
    struct guests *guests = context;
    CHECK(*remote != 0 && *local != 0);
    __atomic_store_n(&guests->gone, 1, __ATOMIC_RELEASE);
}

static void leave(void *context)
{
    __atomic_add_fetch(&((struct guests *)context)->released, 1, __ATOMIC_RELEASE);
}

static void admission(void)
{
    struct guests guests = {0, 0, 0};
    towpath_mux *mux;
    uint16_t port;
    char buffer[10];
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", 0, &mux) == 0);
    CHECK(towpath_mux_set_admission(mux, NULL, left, NULL, NULL) == -EINVAL);
    CHECK(towpath_mux_set_admission(mux, admit, left, &guests, leave) == 0);
    CHECK(towpath_mux_listen(mux, "127.0.0.1:0", &port) == 0);
    int first = to(port);
    says(first, "hello\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == 6 && towpath_mux_done(mux) == 0);
    /* The reset may arrive before connect(2) returns. */
    struct sockaddr_in address = loopback(port);
    int second = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(second, (struct sockaddr *)&address, sizeof address) == 0)
        CHECK(read(second, buffer, 1) == -1);
    CHECK(errno == ECONNRESET);
    close(first);
    while (__atomic_load_n(&guests.gone, __ATOMIC_ACQUIRE) == 0)
        poll(NULL, 0, 1);
    int third = to(port);
    CHECK(read(third, buffer, 1) == 0);
    close(second);
    close(third);
    CHECK(towpath_mux_close(mux, 10000) == 1);
    while (__atomic_load_n(&guests.released, __ATOMIC_ACQUIRE) == 0)
        poll(NULL, 0, 1);
    CHECK(guests.released == 1);
}

int main(void)
{
    framings();
    functions();
    tls();
    reloads();
    starttls();
    unix_sockets();
    admission();
    return 0;
}
