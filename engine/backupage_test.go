package engine_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/plan"
)

// backup writes a backup of a cluster with a hole for each reason, and returns its ID.
func (s *checkStage) backup(age time.Duration, cluster string, holes ...string) string {
	s.Helper()
	created := checkTime.Add(-age)
	id := "backup-" + created.Format("20060102150405") + "-0a1b2c3d"
	w, err := backup.Create(filepath.Join(s.dir, plan.RunsDir), id)
	if err != nil {
		s.Fatal(err)
	}
	for _, h := range holes {
		w.Hole(backup.Hole{Group: "example.com", Resource: "widgets", Reason: h})
	}
	if _, err := w.Commit(backup.Manifest{Created: created, Cluster: backup.Cluster{ID: cluster}}); err != nil {
		s.Fatal(err)
	}
	return id
}

func TestAgeOfTheLastBackup(t *testing.T) {
	for _, tt := range []struct {
		name  string
		given func(s *checkStage) (id string) // of the last whole one
		find  string                          // of upgrade check; a prefix
		why   string                          // of home; empty if it does not suggest one
	}{
		{name: "a fresh one is fine", given: func(s *checkStage) string { return s.backup(time.Minute, clusterID) }, find: "ok backup-age: the last backup is less than 24h old"},
		{name: "none", given: func(*checkStage) string { return "" }, find: "warn backup-age: this cluster has no complete backup", why: "there is none yet"},
		{name: "an old one", given: func(s *checkStage) string {
			s.backup(80*time.Hour, clusterID)
			return s.backup(26*time.Hour, clusterID)
		}, find: "warn backup-age: the last backup is 26h old", why: "the last one is 26h old"},
		{name: "a very old one", given: func(s *checkStage) string { return s.backup(80*time.Hour, clusterID) }, find: "warn backup-age: the last backup is 3 days old", why: "the last one is 3 days old"},
		{name: "one of the cluster that was here before", given: func(s *checkStage) string { s.backup(time.Minute, strings.Repeat("0", 64)); return "" }, find: "warn backup-age: this cluster has no complete backup", why: "there is none yet"},
		{name: "one with a hole does not count", given: func(s *checkStage) string {
			s.backup(time.Minute, clusterID, "its conversion webhook does not answer")
			return s.backup(30*time.Hour, clusterID)
		}, find: "warn backup-age: the last backup is 30h old", why: "the last one is 30h old"},
		{name: "a directory that others may write is not believed", given: func(s *checkStage) string {
			s.backup(time.Minute, clusterID)
			if err := os.Chmod(filepath.Join(s.dir, plan.RunsDir), 0o777); err != nil {
				s.Fatal(err)
			}
			return ""
		}, find: "not-checked backup-age: not checked how old the last backup is"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			if err := os.RemoveAll(filepath.Join(s.dir, plan.RunsDir)); err != nil {
				t.Fatal(err)
			}
			id := tt.given(s)
			c := s.mustCheck(check.Request{NoPreflight: true})
			var got []string
			for _, f := range c.Findings {
				if f.ID == plan.BackupAge {
					got = append(got, string(f.Severity)+" "+f.ID+": "+f.Title)
				}
			}
			if len(got) != 1 || !strings.HasPrefix(got[0], tt.find) {
				t.Errorf("check finds %q, want %q", got, tt.find)
			}
			h, err := s.engine().Home(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			why := ""
			for _, n := range h.Next {
				if strings.Contains(n.Command, "backup create") {
					why = n.Why
				}
			}
			if why != tt.why {
				t.Errorf("home says %q, want %q", why, tt.why)
			}
			st, err := s.engine().Status(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			told := slices.ContainsFunc(st.Health, func(f plan.Finding) bool { return f.ID == plan.BackupAge })
			if ok := strings.HasPrefix(tt.find, "ok"); told == ok {
				t.Errorf("status: %+v", st.Health)
			}
			for _, b := range []*plan.LastBackup{h.Backup, st.Backup} {
				if b == nil && id != "" || b != nil && b.ID != id {
					t.Errorf("the last one is %+v, want %q", b, id)
				}
			}
		})
	}
}
