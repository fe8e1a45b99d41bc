// A worker of towpath mux that answers each line in capitals. A template for other workers.
//
//	go build -o worker ./examples/worker
//	towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker ./worker
package main

import (
	"bytes"
	"context"
	"log"

	"github.com/towpath/towpath-go"
)

func main() {
	log.SetFlags(0)
	// Towpath starts this program and sets TOWPATH_SOCKET to the socket to attach to.
	worker, err := towpath.AttachWorker(towpath.WorkerConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer worker.Close()
	// If this process ends while it has a message, another worker gets the message.
	err = worker.Serve(context.Background(), func(message *towpath.WorkerMessage) ([]byte, error) {
		return bytes.ToUpper(message.Bytes), nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
