package decision

import (
	"sync"
	"time"
)

// FirstSeen remembers since when something is known, by our own clock. The clocks of
// the cloud, of the API server and of the operator before us may be half an hour off,
// so a time that one of them has written down is not compared with ours alone: what is
// new to us is given a time that we have measured, as if it had just begun. An operator
// that was started anew measures anew.
//
// The zero value knows of nothing. It is safe for concurrent use.
type FirstSeen struct {
	mu    sync.Mutex
	first map[string]*sighting
	swept time.Time
}

type sighting struct{ first, last time.Time }

// unasked is how long something is remembered that nobody asks for.
const unasked = time.Hour

// Since returns when key was first asked for.
func (s *FirstSeen) Since(key string, now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.first == nil {
		s.first = map[string]*sighting{}
	}
	if now.Sub(s.swept) > unasked {
		for k, v := range s.first {
			if now.Sub(v.last) > unasked {
				delete(s.first, k)
			}
		}
		s.swept = now
	}
	v := s.first[key]
	if v == nil {
		v = &sighting{first: now}
		s.first[key] = v
	}
	v.last = now
	return v.first
}

// Until returns when a time is over that is written down as written: not before key was
// known to us for least.
func (s *FirstSeen) Until(key string, written, now time.Time, least time.Duration) time.Time {
	if t := s.Since(key, now).Add(least); t.After(written) {
		return t
	}
	return written
}
