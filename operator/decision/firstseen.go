package decision

import (
	"sync"
	"time"
)

// FirstSeen records the first-seen time of keys, by our own clock. The clocks of the cloud, of the
// API server and of an earlier operator may be half an hour off. So a timestamp of theirs never
// shortens a deadline: something new gets the full time from when we first saw it. A restarted
// operator starts again.
//
// The zero value is empty. It is safe for concurrent use.
type FirstSeen struct {
	mu    sync.Mutex
	first map[string]*seenTimes
	swept time.Time
}

type seenTimes struct{ first, last time.Time }

// unasked is how long a key is remembered that is not used.
const unasked = time.Hour

// Since returns the first-seen time of key.
func (s *FirstSeen) Since(key string, now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.first == nil {
		s.first = map[string]*seenTimes{}
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
		v = &seenTimes{first: now}
		s.first[key] = v
	}
	v.last = now
	return v.first
}

// Until returns the deadline written, but not before least has passed since key was first seen.
func (s *FirstSeen) Until(key string, written, now time.Time, least time.Duration) time.Time {
	if t := s.Since(key, now).Add(least); t.After(written) {
		return t
	}
	return written
}
