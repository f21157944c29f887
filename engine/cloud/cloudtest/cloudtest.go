// Package cloudtest is the conformance suite of clouds: what the operator relies on
// when it creates, finds and deletes machines. Each cloud's tests call [Run].
package cloudtest

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
)

// Options say which cloud is tested, and what it cannot do.
type Options struct {
	// Cloud is tested. It may have machines; they are left alone.
	Cloud providers.Control
	// Group is the ID of a group of workers that the suite may add machines to.
	Group string
	// Unknown is a well-formed provider ID of no machine.
	Unknown string
	// Images are two references of images for SetGroupImage; nil: the cloud has no
	// images.
	Images []string
	// Within bounds every wait for what a cloud does later, such as deletions and
	// lists that lag; zero means one minute.
	Within time.Duration
}

type suite struct {
	Options
	*testing.T
	ctx context.Context
}

// Run tests a cloud. The subtests use and delete five machines in all; two at a time
// at most, so that a test on real machines stays short.
func Run(t *testing.T, o Options) {
	t.Helper()
	if o.Within == 0 {
		o.Within = time.Minute
	}
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"groups have an ID, a role and a name of their own", (*suite).groups},
		{"a token makes one machine, also when two callers repeat it", (*suite).tokens},
		{"a token of a deleted machine makes no second one", (*suite).deleted},
		{"the answer to a creation has the order of its tokens", (*suite).order},
		{"a missing object is not found, and its deletion is no error", (*suite).unknown},
		{"only new machines get the group's new image", (*suite).images},
		{"a call ends with its context", (*suite).cancelled},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &suite{Options: o, T: t, ctx: t.Context()}
			c.test(s)
		})
	}
}

func (s *suite) groups() {
	var groups []cloud.Group
	s.retry("list groups", func() (err error) {
		groups, err = s.Cloud.Groups(s.ctx)
		return err
	})
	seen := map[string]bool{}
	for _, g := range groups {
		if g.ID == "" || g.Name == "" || !g.Role.Valid() || seen[g.ID] {
			s.Errorf("group %+v lacks an ID of its own, a name or a role", g)
		}
		if len(s.Images) > 0 && g.Image == "" {
			s.Errorf("group %s has no image", g.ID)
		}
		seen[g.ID] = true
	}
	if !seen[s.Group] {
		s.Errorf("no group %s in %+v", s.Group, groups)
	}
}

func (s *suite) tokens() {
	token := newToken()
	var wg sync.WaitGroup
	made := make([]cloud.Instance, 2)
	for n := range made {
		wg.Go(func() {
			l, err := s.Cloud.CreateInstances(s.ctx, s.Group, []string{token})
			if err == nil && len(l) == 1 {
				made[n] = l[0]
			}
		})
	}
	wg.Wait()
	for n := range made { // a call may have been throttled
		if made[n].ProviderID == "" {
			made[n] = s.create(token)[0]
		}
	}
	defer s.delete(made[0])
	if made[0].ProviderID != made[1].ProviderID {
		s.Errorf("one token made %s and %s", made[0].ProviderID, made[1].ProviderID)
	}
	if again := s.create(token)[0]; again.ProviderID != made[0].ProviderID || again.Name != made[0].Name {
		s.Errorf("the repeated token returned %+v, want %+v", again, made[0])
	}
	var i cloud.Instance
	s.retry("read the machine by its ID", func() (err error) {
		i, err = s.Cloud.Instance(s.ctx, made[0].ProviderID)
		return err
	})
	if i.Name != made[0].Name || i.Token != token || i.Group != s.Group || i.Role != cloud.Worker {
		s.Errorf("a read by ID right after the creation: %+v; want machine %s of group %s with its token and role", i, made[0].Name, s.Group)
	}
	s.eventually("the machine is listed once, with its token", func() (string, bool) {
		l := s.withToken(token)
		return fmt.Sprintf("%+v", l), len(l) == 1 && l[0].ProviderID == made[0].ProviderID
	})
}

func (s *suite) deleted() {
	token := newToken()
	made := s.create(token)[0]
	s.delete(made)
	if again := s.create(token)[0]; again.State != cloud.Terminated {
		s.Errorf("the token of a deleted machine returned %+v, want it Terminated", again)
	}
	for _, i := range s.list() {
		if i.Token == token && i.State != cloud.Terminated && i.State != cloud.Terminating {
			s.Errorf("the token of a deleted machine made %+v", i)
		}
	}
}

func (s *suite) order() {
	tokens := []string{newToken(), newToken()}
	made := s.create(tokens...)
	slices.Reverse(tokens)
	again := s.create(tokens...)
	for n := range made {
		if made[n].ProviderID != again[len(again)-1-n].ProviderID {
			s.Errorf("tokens in reverse order returned %+v, want the reverse of %+v", again, made)
		}
		if made[n].ProviderID == made[(n+1)%len(made)].ProviderID {
			s.Errorf("two tokens made one machine: %+v", made[n])
		}
	}
	s.delete(made...)
}

func (s *suite) unknown() {
	s.retry("read an instance that does not exist", func() error {
		i, err := s.Cloud.Instance(s.ctx, s.Unknown)
		if errors.Is(err, cloud.ErrNotFound) {
			return nil
		}
		return fmt.Errorf("%+v, %w, want cloud.ErrNotFound", i, cmp.Or(err, errors.New("no error")))
	})
	s.retry("delete an instance that does not exist", func() error { return s.Cloud.DeleteInstances(s.ctx, []string{s.Unknown}) })
	s.retry("delete nothing", func() error { return s.Cloud.DeleteInstances(s.ctx, nil) })
	if l := s.create(); len(l) > 0 {
		s.Errorf("no token made %+v", l)
	}
}

func (s *suite) images() {
	if len(s.Images) == 0 {
		s.Skip("this cloud has no images")
	}
	before := s.image()
	defer func() {
		s.retry("set the image back", func() error { return s.Cloud.SetGroupImage(s.ctx, s.Group, before) })
	}()
	existing := s.list()
	to := s.Images[0]
	if to == before {
		to = s.Images[1]
	}
	s.retry("set the image", func() error { return s.Cloud.SetGroupImage(s.ctx, s.Group, to) })
	s.eventually("the group has the new image", func() (string, bool) { return s.image(), s.image() == to })
	made := s.create(newToken())[0]
	defer s.delete(made)
	if made.Image != to {
		s.Errorf("a new machine has image %s, want %s", made.Image, to)
	}
	for _, old := range existing {
		if i, err := s.Cloud.Instance(s.ctx, old.ProviderID); err == nil && i.Image != old.Image {
			s.Errorf("existing machine %s changed its image from %s to %s", i.Name, old.Image, i.Image)
		}
	}
}

func (s *suite) cancelled() {
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	if _, err := s.Cloud.Instances(ctx); !errors.Is(err, context.Canceled) {
		s.Errorf("a cancelled call ended with %v, want context.Canceled", err)
	}
}

// create makes machines, over errors that pass.
func (s *suite) create(tokens ...string) (made []cloud.Instance) {
	s.retry("create machines", func() (err error) {
		made, err = s.Cloud.CreateInstances(s.ctx, s.Group, tokens)
		if err == nil && len(made) != len(tokens) {
			return fmt.Errorf("%d instances for %d tokens", len(made), len(tokens))
		}
		return err
	})
	return made
}

// delete deletes machines and waits until the cloud reports them as gone.
func (s *suite) delete(all ...cloud.Instance) {
	var ids []string
	for _, i := range all {
		ids = append(ids, i.ProviderID)
	}
	s.retry("delete machines", func() error { return s.Cloud.DeleteInstances(s.ctx, ids) })
	for _, i := range all {
		s.eventually(i.Name+" is gone", func() (string, bool) {
			now, err := s.Cloud.Instance(s.ctx, i.ProviderID)
			// Where IDs are reused, another machine can have this one's ID by now.
			gone := errors.Is(err, cloud.ErrNotFound) || err == nil && (now.State == cloud.Terminated || now.Token != i.Token)
			return fmt.Sprintf("%+v, %v", now, err), gone
		})
	}
}

func (s *suite) list() (l []cloud.Instance) {
	s.retry("list machines", func() (err error) {
		l, err = s.Cloud.Instances(s.ctx)
		return err
	})
	return l
}

func (s *suite) withToken(token string) []cloud.Instance {
	return slices.DeleteFunc(slices.Clone(s.list()), func(i cloud.Instance) bool { return i.Token != token })
}

func (s *suite) image() string {
	var image string
	s.retry("list groups", func() error {
		groups, err := s.Cloud.Groups(s.ctx)
		for _, g := range groups {
			if g.ID == s.Group {
				image = g.Image
			}
		}
		return err
	})
	return image
}

// retry repeats a call while the cloud throttles or is unavailable.
func (s *suite) retry(what string, call func() error) {
	var err error
	s.eventually(what, func() (string, bool) {
		err = call()
		return fmt.Sprint(err), !errors.Is(err, cloud.ErrThrottled) && !errors.Is(err, cloud.ErrUnavailable) && !errors.Is(err, cloud.ErrPartial)
	})
	if err != nil {
		s.Errorf("%s: %v", what, err)
		s.FailNow()
	}
}

// eventually polls, because a cloud reports a change by nothing else.
func (s *suite) eventually(what string, holds func() (string, bool)) {
	s.Helper()
	for deadline := time.Now().Add(s.Within); ; {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: not so after %v; it is %s", what, s.Within, is)
		}
		select {
		case <-s.ctx.Done():
			s.Fatalf("%s: %v", what, s.ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func newToken() string {
	b := make([]byte, 20)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b[:12]) + "-" + hex.EncodeToString(b[12:])
}
