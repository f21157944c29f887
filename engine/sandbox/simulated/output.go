package simulated

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// longestLine limits a line of a container's output, in bytes; longer ones are split.
const longestLine = 16 << 10

// output is the output of one process of a container, in a file. Each line begins with its
// time, as in container runtimes. It is safe for concurrent use.
type output struct {
	path string
	id   string // of the container that the process stands for

	mu    sync.Mutex
	file  *os.File
	part  []byte        // of a line that has not ended
	more  chan struct{} // closed when there is more, or at the end
	ended bool
}

// newOutput creates a separate file for a start of a container.
func newOutput(c *computer, pod *corev1.Pod, name string) (*output, error) {
	for n := 0; ; n++ {
		path := c.logFile(pod, name, n)
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		id := fmt.Sprintf("simulated://%s/%s/%s/%d", pod.Namespace, pod.Name, name, n)
		return &output{path: path, id: id, file: f, more: make(chan struct{})}, nil
	}
}

// Write implements io.Writer, and never fails.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.part = append(o.part, p...)
	var out bytes.Buffer
	for stamp := time.Now().UTC().Format(time.RFC3339Nano); ; {
		i := bytes.IndexByte(o.part, '\n')
		if i < 0 && len(o.part) < longestLine {
			break
		}
		if i < 0 || i > longestLine {
			i = longestLine
		}
		fmt.Fprintf(&out, "%s %s\n", stamp, o.part[:i])
		o.part = bytes.TrimPrefix(o.part[i:], []byte("\n"))
	}
	o.part = append([]byte(nil), o.part...) // free the written part
	if out.Len() == 0 {
		return len(p), nil
	}
	_, _ = o.file.Write(out.Bytes()) // a full disk loses lines; an error would end the process that writes them
	o.wake()
	return len(p), nil
}

// wake makes followers read again; o.mu is held.
func (o *output) wake() {
	close(o.more)
	o.more = make(chan struct{})
}

// end marks that the process is gone.
func (o *output) end() {
	if o.tail() {
		_, _ = o.Write([]byte("\n")) // its last line was incomplete
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.wake()
	o.file.Close()
}

func (o *output) tail() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.part) > 0
}

// next returns a channel that is closed when there is more output; nil after the
// end.
func (o *output) next() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return nil
	}
	return o.more
}

// send copies lines according to a request for logs, until the end or until ctx ends.
// It calls flush before it waits.
func (o *output) send(ctx context.Context, to io.Writer, want corev1.PodLogOptions, flush func()) error {
	f, err := os.Open(o.path)
	if err != nil {
		return err
	}
	defer f.Close()
	var since time.Time
	switch {
	case want.SinceTime != nil:
		since = want.SinceTime.Time
	case want.SinceSeconds != nil:
		since = time.Now().Add(-time.Duration(*want.SinceSeconds) * time.Second)
	}
	skip := int64(0)
	if want.TailLines != nil {
		if skip, err = countLines(f); err != nil {
			return err
		}
		skip -= *want.TailLines
	}
	left := int64(-1)
	if want.LimitBytes != nil {
		left = *want.LimitBytes
	}
	in := bufio.NewReader(f)
	var part string
	for {
		more := o.next() // before reading, so that nothing is missed
		for {
			line, err := in.ReadString('\n')
			part += line
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			line, part = part, ""
			if skip--; skip >= 0 {
				continue
			}
			stamp, text, _ := strings.Cut(line, " ")
			if t, err := time.Parse(time.RFC3339Nano, stamp); err == nil && t.Before(since) {
				continue
			}
			if want.Timestamps {
				text = line
			}
			if left >= 0 {
				text = text[:min(int64(len(text)), left)]
				left -= int64(len(text))
			}
			if _, err := io.WriteString(to, text); err != nil || left == 0 {
				return err
			}
		}
		if !want.Follow || more == nil {
			return nil
		}
		flush()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-more:
		}
	}
}

func countLines(f *os.File) (n int64, err error) {
	in := bufio.NewReader(f)
	for {
		_, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF):
			_, err = f.Seek(0, io.SeekStart)
			return n, err
		case err != nil:
			return 0, err
		default:
			n++
		}
	}
}

// logOptions parses the options of a request for logs. Other options of a kubelet are not supported.
func logOptions(q url.Values) (o corev1.PodLogOptions, err error) {
	for name, to := range map[string]*bool{"follow": &o.Follow, "previous": &o.Previous, "timestamps": &o.Timestamps} {
		if v := q.Get(name); v != "" {
			if *to, err = strconv.ParseBool(v); err != nil {
				return o, fmt.Errorf("%s: want true or false, not %q", name, v)
			}
		}
	}
	for name, to := range map[string]**int64{"tailLines": &o.TailLines, "sinceSeconds": &o.SinceSeconds, "limitBytes": &o.LimitBytes} {
		if v := q.Get(name); v != "" {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil || n < 0 {
				return o, fmt.Errorf("%s: want a number, not %q", name, v)
			}
			*to = &n
		}
	}
	if v := q.Get("sinceTime"); v != "" {
		t, err := time.Parse(time.RFC3339, v)
		if err != nil {
			return o, fmt.Errorf("sinceTime: %w", err)
		}
		o.SinceTime = new(metav1.NewTime(t))
	}
	return o, nil
}

// logs serves the output of a container, as kubelets do. For pods without processes it
// reports that they are simulated.
func (k *kubelet) logs(w http.ResponseWriter, r *http.Request) {
	want, err := logOptions(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: r.PathValue("namespace"), Name: r.PathValue("pod")}}
	name := r.PathValue("container")
	c := k.c.pods.container(pod.Namespace, pod.Name, k.c.Name, name)
	if c == nil {
		fmt.Fprintln(w, StandIn+": nothing runs in this pod, it is only said to run")
		return
	}
	o := c.said(want.Previous)
	if o == nil {
		http.Error(w, fmt.Sprintf("container %q in pod %q has not said anything", name, pod.Name), http.StatusBadRequest)
		return
	}
	flush := func() {}
	if f, ok := w.(http.Flusher); ok {
		flush = f.Flush
	}
	flush() // the header, so that followers know that the request succeeded
	if err := o.send(r.Context(), w, want, flush); err != nil && r.Context().Err() == nil {
		k.log.Warn("log not sent", "pod", pod.Namespace+"/"+pod.Name, "container", name, "err", err)
	}
}
