package towpath

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The engine starts this test program as its inspector or worker: "PROGRAM child MODE [FILE]".
func TestMain(m *testing.M) {
	if len(os.Args) < 3 || os.Args[1] != "child" {
		os.Exit(m.Run())
	}
	child, ok := children[os.Args[2]]
	if !ok {
		fail(fmt.Errorf("no such mode: %s", os.Args[2]))
	}
	child()
	// Shows that it completed.
	if len(os.Args) > 3 {
		fail(os.WriteFile(os.Args[3], nil, 0o600))
	}
	os.Exit(0)
}

var children = map[string]func(){
	"single":   single,
	"batch":    batch,
	"hold":     hold,
	"upper":    upper,
	"mark":     mark,
	"flow":     flow,
	"context":  contextEndsAWait,
	"close":    closeEndsAWait,
	"callback": callback,
	"modify":   modify,
	"upto":     upto,
	"serve":    serve,
	"replies":  replies,
	"cancel":   cancelWorker,
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
}

func expect(fits bool, what string) {
	if !fits {
		fail(errors.New(what))
	}
}

func attach() *Inspector {
	inspector, err := AttachInspector(InspectorConfig{Name: "go"})
	fail(err)
	return inspector
}

// frames calls a function for each batch until the end.
func frames(inspector *Inspector, decide func([]Frame)) {
	batch := make([]Frame, 32)
	for {
		count, err := inspector.Recv(context.Background(), batch)
		if err == io.EOF {
			fail(inspector.Close())
			expect(errors.Is(inspector.Close(), os.ErrClosed), "a second close fails")
			return
		}
		fail(err)
		expect(count > 0 && count <= len(batch), "a batch has frames")
		decide(batch[:count])
	}
}

// single drops each second frame.
func single() {
	odd := false
	frames(attach(), func(batch []Frame) {
		for i := range batch {
			frame := &batch[i]
			expect(frame.Kind == Packet && frame.Queue == 1 && frame.LinkType == 1, "the fields of a packet")
			expect(frame.Network >= 14 && frame.Data > frame.Network && frame.Time.Unix() > 0, "the offsets of a packet")
			expect(frame.Payload[frame.Network]>>4 == 4, "IPv4")
			expect(errors.Is(frame.SetVerdict(0), syscall.EINVAL), "an invalid verdict is refused")
			verdict := Drop
			if odd {
				verdict = Pass
			}
			odd = !odd
			fail(frame.SetVerdict(verdict))
			err := frame.SetVerdict(verdict)
			expect(errors.Is(err, syscall.ESTALE) && err.Error() != "towpath: ", "a second verdict is refused")
			expect(errors.Is(frame.Replace([]byte("x")), syscall.ESTALE), "a late replacement is refused")
		}
	})
}

// batch decides all frames of a batch with one call.
func batch() {
	inspector := attach()
	frames(inspector, func(batch []Frame) {
		fail(batch[0].SetVerdict(Drop))
		expect(errors.Is(inspector.SetVerdictAll(Hold), syscall.EINVAL), "all cannot be held")
		fail(inspector.SetVerdictAll(Pass))
		expect(errors.Is(batch[len(batch)-1].SetVerdict(Pass), syscall.ESTALE), "all have a verdict")
	})
}

// upto decides all frames of a batch with the last one.
func upto() {
	frames(attach(), func(batch []Frame) {
		fail(batch[len(batch)-1].SetVerdictUpTo(Drop))
		expect(errors.Is(batch[0].SetVerdict(Pass), syscall.ESTALE), "all have a verdict")
	})
}

// hold decides in reverse order, in another goroutine for each frame.
func hold() {
	frames(attach(), func(batch []Frame) {
		for i := range batch {
			fail(batch[i].SetVerdict(Hold))
		}
		var all sync.WaitGroup
		for i := len(batch) - 1; i >= 0; i-- {
			all.Add(1)
			go func() {
				defer all.Done()
				fail(batch[i].SetVerdict(Drop))
			}()
		}
		all.Wait()
	})
}

// upper replaces the payload with capitals.
func upper() {
	frames(attach(), func(batch []Frame) {
		for i := range batch {
			frame := &batch[i]
			payload := append([]byte(nil), frame.Payload...)
			copy(payload[frame.Data:], bytes.ToUpper(payload[frame.Data:]))
			expect(errors.Is(frame.Replace(make([]byte, 1<<24)), syscall.EMSGSIZE), "a large payload is refused")
			fail(frame.Replace(payload))
		}
	})
}

// mark sets a mark of some frames. A rule drops packets with this mark.
func mark() {
	odd := false
	frames(attach(), func(batch []Frame) {
		for i := range batch {
			value := uint32(5)
			if odd {
				value = 7
			}
			odd = !odd
			fail(batch[i].SetVerdictWithMark(Pass, value|8, 7))
		}
	})
}

// flow decides each flow with its first frame.
func flow() {
	frames(attach(), func(batch []Frame) {
		for i := range batch {
			fail(batch[i].SetVerdict(Drop.Flow()))
		}
	})
}

// contextEndsAWait keeps frames until the engine sends no more, so that Recv waits until its context ends.
func contextEndsAWait() {
	inspector := attach()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	batch := make([]Frame, 8)
	var held []Frame
	for {
		count, err := inspector.Recv(ctx, batch)
		if err != nil {
			expect(errors.Is(err, context.Canceled), "the context ends the wait")
			break
		}
		// On a busy machine, the first frame may take a while.
		if len(held) == 0 {
			time.AfterFunc(200*time.Millisecond, cancel)
		}
		for _, frame := range batch[:count] {
			fail(frame.SetVerdict(Hold))
			held = append(held, frame)
		}
	}
	expect(len(held) > 0, "frames were received")
	for i := range held {
		fail(held[i].SetVerdict(Drop))
	}
	frames(inspector, func(batch []Frame) {
		for i := range batch {
			fail(batch[i].SetVerdict(Drop))
		}
	})
}

// closeEndsAWait keeps frames until Recv waits, and closes the inspector in another goroutine.
func closeEndsAWait() {
	inspector := attach()
	batch := make([]Frame, 8)
	for received := 0; ; {
		count, err := inspector.Recv(context.Background(), batch)
		if err != nil {
			expect(errors.Is(err, os.ErrClosed), "close ends the wait")
			break
		}
		// On a busy machine, the first frame may take a while.
		if received == 0 {
			time.AfterFunc(200*time.Millisecond, func() { fail(inspector.Close()) })
		}
		received += count
		for i := range batch[:count] {
			if err := batch[i].SetVerdict(Hold); err != nil {
				expect(errors.Is(err, os.ErrClosed), "close ends verdicts")
			}
		}
	}
	_, err := inspector.Recv(context.Background(), batch)
	expect(errors.Is(err, os.ErrClosed), "a closed inspector receives nothing")
	expect(errors.Is(inspector.SetVerdictAll(Pass), os.ErrClosed), "a closed inspector decides nothing")
}

// callback drops packets with a word, in other goroutines, and decides the others in batches of ids.
func callback() {
	inspector := attach()
	var all sync.WaitGroup
	passed := make(chan uint32, 1<<16)
	all.Add(1)
	go func() {
		defer all.Done()
		for id := range passed {
			// ENOENT: a batch up to a later id has decided it.
			if err := inspector.SetVerdictBatch(id, Pass); !errors.Is(err, syscall.ENOENT) {
				fail(err)
			}
			expect(errors.Is(inspector.SetVerdict(id, Drop), syscall.ENOENT), "a second verdict is refused")
		}
	}()
	seen := uint32(0)
	fail(inspector.Register(context.Background(), func(packet Attribute) int {
		seen++
		version := packet.Payload[0] >> 4
		expect(packet.PacketID == seen && (version == 4 || version == 6), "ids and payload of a packet")
		expect(packet.CapLen == uint32(len(packet.Payload)) && !packet.Timestamp.IsZero(), "attributes of a packet")
		if bytes.Contains(packet.Payload, []byte("password=")) {
			fail(inspector.SetVerdict(packet.PacketID, Drop))
			expect(errors.Is(inspector.SetVerdict(packet.PacketID, Pass), syscall.ENOENT), "a second verdict is refused")
		} else {
			passed <- packet.PacketID
		}
		return 0
	}, func(err error) int {
		fail(err)
		return 1
	}))
	close(passed)
	all.Wait()
	expect(len(inspector.undecided.frames) == 0, "all packets are decided")
}

// modify replaces packets with themselves, behind their link header; some get a mark.
func modify() {
	inspector := attach()
	fail(inspector.Register(context.Background(), func(packet Attribute) int {
		if packet.PacketID%2 == 0 {
			fail(inspector.SetVerdictWithMark(packet.PacketID, Pass, 7))
			return 0
		}
		fail(inspector.SetVerdictModPacket(packet.PacketID, append([]byte(nil), packet.Payload...)))
		return 0
	}, func(err error) int {
		fail(err)
		return 1
	}))
}

type queue struct {
	Frames, Passed, Dropped, Replaced, Lost int
}

type report struct {
	Packets, Passed, Dropped int
	Queues                   []queue
}

// towpathCommand is the command towpath, from the environment.
func towpathCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	program := os.Getenv("TOWPATH")
	if program == "" {
		program = "towpath"
	}
	return exec.Command(program, args...)
}

func replay(t *testing.T, rules, command string) report {
	t.Helper()
	cmd := towpathCommand(t, "replay", "../../examples/office.pcap", "--rules", rules, "--json", "--deadline", "60", "--queue", "1="+command)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	var parsed report
	if err := json.Unmarshal(stdout, &parsed); err != nil || len(parsed.Queues) != 1 {
		t.Fatalf("%v: %s", err, stdout)
	}
	return parsed
}

// replayChild replays with this program as the inspector. It must complete.
func replayChild(t *testing.T, rules, mode string) report {
	t.Helper()
	directory := t.TempDir()
	file := filepath.Join(directory, "rules.ipfw")
	if err := os.WriteFile(file, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	done := filepath.Join(directory, "done")
	result := replay(t, file, self(t)+" child "+mode+" "+done)
	if _, err := os.Stat(done); err != nil {
		t.Fatalf("the inspector did not complete: %v", err)
	}
	return result
}

func self(t *testing.T) string {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return program
}

const inspectAll = "add inspect 1 ip4 from any to any\nadd allow all from any to any\n"
const divertAll = "add divert 1 ip4 from any to any\nadd deny ip4 from any to any mark 7\nadd allow all from any to any\n"

func TestVerdicts(t *testing.T) {
	for mode, fits := range map[string]func(queue) bool{
		"single":  func(q queue) bool { return q.Dropped == (q.Frames+1)/2 && q.Passed == q.Frames/2 },
		"batch":   func(q queue) bool { return q.Dropped > 0 && q.Passed > q.Dropped && q.Passed+q.Dropped == q.Frames },
		"upto":    func(q queue) bool { return q.Dropped == q.Frames },
		"hold":    func(q queue) bool { return q.Dropped == q.Frames },
		"upper":   func(q queue) bool { return q.Replaced == q.Frames },
		"context": func(q queue) bool { return q.Dropped == q.Frames },
	} {
		t.Run(mode, func(t *testing.T) {
			result := replayChild(t, inspectAll, mode)
			if q := result.Queues[0]; q.Frames <= 100 || q.Lost != 0 || !fits(q) {
				t.Fatalf("%+v", result)
			}
		})
	}
}

func TestFlowVerdicts(t *testing.T) {
	single, flow := replayChild(t, inspectAll, "single"), replayChild(t, inspectAll, "flow")
	if q := flow.Queues[0]; q.Frames >= single.Queues[0].Frames || q.Frames == 0 || flow.Dropped <= q.Frames {
		t.Fatalf("%+v", flow)
	}
}

func TestMarks(t *testing.T) {
	result := replayChild(t, divertAll, "mark")
	if q := result.Queues[0]; q.Passed != q.Frames || result.Dropped != q.Frames/2 {
		t.Fatalf("%+v", result)
	}
}

func TestModifiedPackets(t *testing.T) {
	result := replayChild(t, divertAll, "modify")
	q := result.Queues[0]
	if q.Replaced != (q.Frames+1)/2 || q.Passed != q.Frames/2 || result.Dropped != q.Frames/2 {
		t.Fatalf("%+v", result)
	}
}

// The frames that the inspector had are lost.
func TestCloseEndsAWait(t *testing.T) {
	result := replayChild(t, inspectAll, "close")
	if result.Queues[0].Lost == 0 {
		t.Fatalf("%+v", result)
	}
}

// build builds an example.
func build(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	if output, err := exec.Command("go", "build", "-o", program, "./examples/"+name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return program
}

// The examples return the same verdicts as the inspector of the command line.
func TestInspectors(t *testing.T) {
	const rules = "../../examples/office.ipfw"
	theirs := replay(t, rules, towpathCommand(t).Path+" inspect --queue 1 --match password= --verdict drop")
	if theirs.Queues[0].Dropped == 0 || theirs.Queues[0].Passed == 0 {
		t.Fatalf("%+v", theirs)
	}
	for _, command := range []string{
		build(t, "inspector") + " password=",
		build(t, "callback") + " password=",
		self(t) + " child callback",
	} {
		if ours := replay(t, rules, command); ours.Packets != theirs.Packets || ours.Dropped != theirs.Dropped || ours.Queues[0] != theirs.Queues[0] {
			t.Fatalf("%s: %+v, not %+v", command, ours, theirs)
		}
	}
}

func TestErrors(t *testing.T) {
	t.Setenv("TOWPATH_SOCKET", "")
	os.Unsetenv("TOWPATH_SOCKET")
	_, err := AttachInspector(InspectorConfig{})
	if !errors.Is(err, syscall.EDESTADDRREQ) || !strings.Contains(err.Error(), "TOWPATH_SOCKET") {
		t.Fatal(err)
	}
	_, err = AttachWorker(WorkerConfig{Socket: filepath.Join(t.TempDir(), "none"), Name: "go"})
	if !errors.Is(err, syscall.ENOENT) {
		t.Fatal(err)
	}
	if Version() == "" {
		t.Fatal("no version")
	}
}

// worker attaches to the mux that started this process.
func worker() *Worker {
	worker, err := AttachWorker(WorkerConfig{})
	fail(err)
	return worker
}

// serve answers each message twice, with the function for messages.
func serve() {
	worker := worker()
	fail(worker.Serve(context.Background(), func(message *WorkerMessage) ([]byte, error) {
		return append([]byte("a "), message.Bytes...), nil
	}))
	fail(worker.Close())
}

// replies answers with all methods of a message.
func replies() {
	worker := worker()
	for {
		message, err := worker.Recv(context.Background())
		if err == io.EOF {
			break
		}
		fail(err)
		expect(string(message.Payload) == strings.TrimSuffix(string(message.Bytes), "\n") && message.Time.Unix() > 0, "the fields of a message")
		expect(message.Part == 0 && !message.More && !message.Cut, "a whole message")
		if string(message.Payload) == "quit" {
			fail(message.Reply([]byte("bye\n")))
			fail(message.CloseAfter())
			fail(message.Done())
			continue
		}
		if string(message.Payload) == "reset" {
			fail(worker.ResetConnection(message.Connection))
			fail(message.Done())
			continue
		}
		fail(message.ReplyPart([]byte("a ")))
		fail(message.Reply(message.Bytes))
		fail(worker.Send(message.Connection, []byte("sent\n")))
		unsent, err := worker.PollUnsent()
		expect(unsent == nil && err == nil, "nothing is unsent")
		fail(message.Done())
		expect(errors.Is(message.Done(), syscall.ESTALE), "a message is done once")
		expect(errors.Is(message.Reply(nil), syscall.ESTALE), "a late answer is refused")
	}
	fail(worker.Close())
}

// cancelWorker waits until its context ends, then creates the file, and answers.
func cancelWorker() {
	worker := worker()
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err := worker.Recv(ctx)
	expect(errors.Is(err, context.Canceled), "the context ends the wait")
	_, err = worker.Recv(ctx)
	expect(errors.Is(err, context.Canceled), "an ended context does not wait")
	fail(os.WriteFile(os.Args[3], nil, 0o600))
	fail(worker.Serve(context.Background(), func(message *WorkerMessage) ([]byte, error) { return message.Bytes, nil }))
	fail(worker.Close())
}

// mux starts a mux with a worker, and connects to it.
func mux(t *testing.T, worker string) (func() net.Conn, func() string) {
	t.Helper()
	cmd := towpathCommand(t, "mux", "127.0.0.1:0", "--framing", `delimiter="\n" strip=delimiter`, "--order", "replies", "--workers", "1", "--worker", worker)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	lines := bufio.NewReader(stderr)
	line, err := lines.ReadString('\n')
	address, listens := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !listens {
		t.Fatalf("%v: %s", err, line)
	}
	connect := func() net.Conn {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(30 * time.Second))
		return conn
	}
	// Drains the mux, which ends its worker, and returns its report.
	end := func() string {
		cmd.Process.Signal(syscall.SIGTERM)
		said, _ := io.ReadAll(lines)
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		return string(said)
	}
	return connect, end
}

func exchange(t *testing.T, conn net.Conn, text, answer string) {
	t.Helper()
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(answer))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != answer {
		t.Fatalf("%v: %.200q", err, got)
	}
}

func TestServe(t *testing.T) {
	connect, end := mux(t, self(t)+" child serve")
	conn := connect()
	exchange(t, conn, "hello\n\nworld\n", "a hello\na \na world\n")
	long := strings.Repeat("x", 100_000) + "\n"
	exchange(t, conn, long, "a "+long)
	conn.Close()
	if said := end(); !strings.Contains(said, "4 messages: 4 done") {
		t.Fatal(said)
	}
}

func TestReplies(t *testing.T) {
	connect, end := mux(t, self(t)+" child replies")
	conn := connect()
	exchange(t, conn, "hello\n", "a hello\nsent\n")
	exchange(t, conn, "quit\n", "bye\n")
	if rest, err := io.ReadAll(conn); err != nil || len(rest) != 0 {
		t.Fatalf("%v: %q", err, rest)
	}
	conn = connect()
	if _, err := io.WriteString(conn, "reset\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	end()
}

func TestCancelWorker(t *testing.T) {
	done := filepath.Join(t.TempDir(), "done")
	connect, end := mux(t, self(t)+" child cancel "+done)
	conn := connect()
	for _, err := os.Stat(done); err != nil; _, err = os.Stat(done) {
		time.Sleep(10 * time.Millisecond)
	}
	exchange(t, conn, "hello\n", "hello\n")
	conn.Close()
	end()
}

func TestWorkerExample(t *testing.T) {
	connect, end := mux(t, build(t, "worker"))
	conn := connect()
	exchange(t, conn, "hello\nworld\n", "HELLO\nWORLD\n")
	conn.Close()
	end()
}
