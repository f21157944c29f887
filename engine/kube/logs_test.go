package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"constellation/engine/cluster"
)

// podServer answers a client that follows the pods of a service: the list, the watch, one pod,
// and its log. Each request for the log gets the next stream.
type podServer struct {
	mu      sync.Mutex
	id      string   // of the container
	streams []string // of the log; the last one stays open
	news    chan string
}

// unknownPod is the log of a pod that a restarted kubelet does not list yet.
const unknownPod = "404"

func (p *podServer) pod() string {
	return fmt.Sprintf(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"joinservice-a","namespace":"constellation-system"},"spec":{"nodeName":"control-plane-0"},"status":{"containerStatuses":[{"name":"joinservice","containerID":%q,"state":{"running":{}}}]}}`, p.id)
}

func (p *podServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	flush := w.(http.Flusher).Flush
	p.mu.Lock()
	pod := p.pod()
	p.mu.Unlock()
	switch {
	case strings.HasSuffix(r.URL.Path, "/log"):
		p.mu.Lock()
		text, last := p.streams[0], len(p.streams) == 1
		if !last {
			p.streams = p.streams[1:]
		}
		p.mu.Unlock()
		if text == unknownPod {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
			return
		}
		fmt.Fprint(w, text)
		flush()
		if last {
			<-r.Context().Done()
		}
	case r.URL.Query().Get("watch") != "":
		flush()
		for {
			select {
			case <-r.Context().Done():
				return
			case id, ok := <-p.news:
				if !ok {
					return
				}
				p.mu.Lock()
				p.id = id
				pod := p.pod()
				p.mu.Unlock()
				fmt.Fprintf(w, `{"type":"MODIFIED","object":%s}`+"\n", pod)
				flush()
			}
		}
	case strings.HasSuffix(r.URL.Path, "/pods"):
		fmt.Fprintf(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[%s]}`, pod)
	default:
		fmt.Fprint(w, pod)
	}
}

func TestFollowHasNoGapsOrDuplicates(t *testing.T) {
	p := &podServer{id: "containerd://1", news: make(chan string), streams: []string{
		"2026-11-21T07:00:00.1Z before the time that was asked for\n2026-11-21T07:00:01.2Z one\n2026-11-21T07:00:01.5Z two\n",
		unknownPod,
		"2026-11-21T07:00:01.2Z one\n2026-11-21T07:00:01.5Z two\n2026-11-21T07:00:02Z three, after the connection was lost\n2026-11-21T07:00:03Z " + strings.Repeat("x", 2*maxLine) + "\nno timestamp\n2026-11-21T07:00:04Z five\n",
	}}
	s := httptest.NewServer(p)
	defer s.Close()
	c, err := ForConfig(&rest.Config{Host: s.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	since := time.Date(2026, 11, 21, 7, 0, 1, 0, time.UTC)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var got []string
	err = c.Follow(ctx, "joinservice", since, func(l cluster.LogLine) {
		got = append(got, l.Text)
		if l.Node != "control-plane-0" || l.Pod != "joinservice-a" || !l.Time.After(since) {
			t.Errorf("line %+v", l)
		}
		if len(got) == 5 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
	if len(got) == 5 && len(got[3]) <= maxLine {
		got[3] = got[3][:1]
	}
	if want := []string{"one", "two", "three, after the connection was lost", "x", "five"}; !slices.Equal(got, want) {
		t.Errorf("lines %q, want %q", got, want)
	}
}

func TestFollowRestartedContainer(t *testing.T) {
	p := &podServer{id: "containerd://1", news: make(chan string), streams: []string{"2026-11-21T07:00:02Z of the first\n"}}
	s := httptest.NewServer(p)
	defer s.Close()
	c, err := ForConfig(&rest.Config{Host: s.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var got []string
	if err := c.Follow(ctx, "joinservice", time.Date(2026, 11, 21, 7, 0, 0, 0, time.UTC), func(l cluster.LogLine) {
		got = append(got, l.Text)
		switch len(got) {
		case 1:
			p.mu.Lock()
			p.streams = []string{"2026-11-21T07:00:03Z of the second\n"}
			p.mu.Unlock()
			go func() { p.news <- "containerd://2" }()
		case 2:
			cancel()
		}
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
	if want := []string{"of the first", "of the second"}; !slices.Equal(got, want) {
		t.Errorf("lines %q, want %q", got, want)
	}
}

func TestFollowWithoutPermissionFails(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
	}))
	defer s.Close()
	c, err := ForConfig(&rest.Config{Host: s.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Follow(t.Context(), "joinservice", time.Now(), func(cluster.LogLine) {}); !errors.Is(err, cluster.ErrDenied) {
		t.Errorf("got %v", err)
	}
}
