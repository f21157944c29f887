package provenance

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"constellation/engine/release"
)

// The IDs of problems.
const (
	NoStatement  = "no-statement"      // a program has no statement
	BadStatement = "bad-statement"     // a statement cannot be read, or contradicts its binary
	NoSignature  = "no-signature"      // a statement is not signed
	BadSignature = "invalid-signature" // no trusted key signed a statement
	NoKey        = "no-key"            // there is no key to verify signatures with
	Altered      = "altered"           // a program differs from its statement
	Missing      = "missing"           // a program of a statement is absent
)

// Problem is a reason why an installation is not verified.
type Problem struct {
	ID   string `json:"id"`
	File string `json:"file"`
	Text string `json:"text"`
}

// Program is one verified binary of an installation.
type Program struct {
	// Name is its path in the installed folder.
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Commit string `json:"commit,omitempty"`
	// Builder is the URI of the builder, as the statement has it.
	Builder string `json:"builder,omitempty"`
	// Signer is the key that signed the statement; empty if no trusted key did.
	Signer string `json:"signer,omitempty"`
}

// Report is the result of Verify.
type Report struct {
	// Executable is the verified program, Dir its folder.
	Executable string    `json:"executable"`
	Dir        string    `json:"dir"`
	SHA256     string    `json:"sha256"`
	Programs   []Program `json:"programs"`
	Problems   []Problem `json:"problems"`
}

// OK reports whether there is no problem.
func (r *Report) OK() bool { return len(r.Problems) == 0 }

// Self returns the entry of the executable itself; nil if it has no statement.
func (r *Report) Self() *Program {
	for i, p := range r.Programs {
		if p.SHA256 == r.SHA256 {
			return &r.Programs[i]
		}
	}
	return nil
}

func (r *Report) add(id, file, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{id, file, fmt.Sprintf(format, args...)})
}

// Verify verifies the installed folder that contains the program exe: the statement and the
// signature of exe, of its second program and of the daemons below releases. build is the
// executable's own. The error is set only without a report.
func Verify(exe string, build Build, keys []release.Key) (Report, error) {
	exe, err := filepath.EvalSymlinks(exe)
	if err != nil {
		return Report{}, fmt.Errorf("find program: %w", err)
	}
	r := Report{Executable: exe, Dir: filepath.Dir(exe), Programs: []Program{}, Problems: []Problem{}}
	if r.SHA256, err = DigestFile(exe); err != nil {
		return Report{}, fmt.Errorf("read program: %w", err)
	}
	statements, err := files(filepath.Join(r.Dir, Dir), func(name string) bool { return strings.HasSuffix(name, Suffix) })
	if err != nil {
		return Report{}, fmt.Errorf("list statements: %w", err)
	}
	if len(statements) > 0 && len(keys) == 0 {
		r.add(NoKey, Dir, "the program contains no key of its publisher")
	}
	stated := map[string]bool{}
	for _, f := range statements {
		r.verify(filepath.Join(Dir, f), keys, build, stated)
	}
	if r.Self() == nil {
		r.add(NoStatement, filepath.Base(exe), "no statement has its digest %s", r.SHA256)
	}
	programs, err := files(filepath.Join(r.Dir, "releases"), func(string) bool { return true })
	if err != nil {
		return Report{}, fmt.Errorf("list programs: %w", err)
	}
	for i, p := range programs {
		programs[i] = "releases/" + p
	}
	if _, err := os.Stat(filepath.Join(r.Dir, "constellation-sandbox")); err == nil {
		programs = append(programs, "constellation-sandbox")
	}
	for _, p := range programs {
		if !stated[p] {
			r.add(NoStatement, p, "no statement names it")
		}
	}
	return r, nil
}

// verify verifies one statement, its signature and its subjects. file is its path in the folder.
func (r *Report) verify(file string, keys []release.Key, self Build, stated map[string]bool) {
	path := filepath.Join(r.Dir, file)
	b, err := readBounded(path, maxStatement)
	if err != nil {
		r.add(BadStatement, file, "%v", err)
		return
	}
	s, err := Parse(b)
	if err != nil {
		r.add(BadStatement, file, "%v", err)
		return
	}
	signer := r.signer(file, b, keys)
	for _, subject := range s.Subject {
		stated[subject.Name] = true
		digest, err := DigestFile(filepath.Join(r.Dir, filepath.FromSlash(subject.Name)))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			r.add(Missing, subject.Name, "%s names it", file)
			continue
		case err != nil:
			r.add(Altered, subject.Name, "%v", err)
			continue
		case digest != subject.Digest["sha256"]:
			r.add(Altered, subject.Name, "its SHA-256 is %s, want %s", digest, subject.Digest["sha256"])
			continue
		}
		if commit := s.Commit(); digest == r.SHA256 && commit != self.Commit {
			r.add(BadStatement, file, "it names commit %s, and the program contains %s", cmp.Or(commit, "none"), cmp.Or(self.Commit, "none"))
		}
		r.Programs = append(r.Programs, Program{subject.Name, digest, s.Commit(), s.Predicate.RunDetails.Builder.ID, signer})
	}
}

// signer returns the key that signed a statement; empty with a problem noted if none did.
func (r *Report) signer(file string, b []byte, keys []release.Key) string {
	sig, err := readBounded(filepath.Join(r.Dir, file+SignatureSuffix), maxSignature)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.add(NoSignature, file, "it has no signature")
		return ""
	case err != nil:
		r.add(BadSignature, file, "%v", err)
		return ""
	case len(keys) == 0:
		return ""
	}
	k, err := release.VerifyFile(b, sig, keys)
	if err != nil {
		r.add(BadSignature, file, "%v", err)
		return ""
	}
	return k.String()
}

// files lists the regular files below dir, sorted; none if it does not exist.
func files(dir string, want func(name string) bool) ([]string, error) {
	found := map[string]bool{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && p == dir {
			return fs.SkipAll
		}
		if err != nil || d.IsDir() || !want(d.Name()) {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		found[filepath.ToSlash(rel)] = true
		return err
	})
	return slices.Sorted(maps.Keys(found)), err
}
