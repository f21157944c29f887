package offline

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/findings"
	"constellation/engine/kube/preflight"
	"constellation/engine/lifecycle"
	"constellation/engine/manifests"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// fromBackup checks a backup. An incomplete backup is an error: missing objects would give no finding.
func fromBackup(ctx context.Context, r findings.OfflineRequest) (*findings.Offline, error) {
	b, err := open(r.Backup)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	var damaged *backup.NotWhole
	err = b.Verify(ctx, nil)
	if errors.As(err, &damaged) && len(damaged.Damage) == 0 {
		err = nil // with holes alone, all content is intact
	}
	if err != nil {
		return nil, fmt.Errorf("check %w", err)
	}
	m := b.Manifest()
	from, err := version.Parse(m.Cluster.Server)
	if err != nil {
		return nil, fmt.Errorf("check backup %s: version of the API server: %w", m.ID, err)
	}
	to := r.To
	if to.IsZero() {
		to = preflight.NextMinor(from)
		if newest := lifecycle.Newest(); newest.Less(to) {
			to = newest
		}
	}
	if to.Less(from) && !to.SameMinor(from) {
		return nil, &plan.Error{Op: "check backup " + m.ID, Err: fmt.Errorf("it is of Kubernetes %s, newer than %s", from, to), Exit: plan.ExitUsage, Remedy: "pass a newer version with --kubernetes"}
	}
	out := &findings.Offline{Kubernetes: to, From: from, Bytes: m.Bytes, Files: len(m.Files)}
	objects := preflight.NewObjects(m.Ended)
	hop := manifests.Request{From: from, To: to}
	var more []plan.Finding
	if m.Etcd != nil {
		c, err := snapshotOf(ctx, b, hop, objects)
		if err != nil {
			return nil, fmt.Errorf("check backup %s: %w", m.ID, err)
		}
		objects.HasSnapshot()
		out.Objects = c.objects
		more = append(c.findings(), c.releases...)
	} else {
		n, releases, err := listed(b, hop, objects)
		if err != nil {
			return nil, fmt.Errorf("check backup %s: %w", m.ID, err)
		}
		objects.HasKinds()
		out.Objects = n
		more = append(releases, plan.Finding{
			ID: "etcd-snapshot", Severity: plan.NotChecked, Source: "files", Title: "not checked: workloads, webhooks and nodes", Objects: []string{"backup/" + m.ID},
			Detail: "the backup has no etcd snapshot", Remedy: "make a backup with `constellation backup create --etcd`",
		})
	}
	for _, h := range m.Holes {
		more = append(more, plan.Finding{
			ID: "backup-holes", Severity: plan.NotChecked, Source: "files", Title: "not checked: " + preflight.Printable(h.String()), Objects: []string{"backup/" + m.ID},
			Detail: "it could not be read when the backup was made",
		})
	}
	found, err := objects.Check(ctx, check.PreflightRequest{From: from, To: to, ReplaceControlPlanes: true, ReplaceWorkers: true, Surge: 1})
	if err != nil {
		return nil, err
	}
	out.Findings = append(more, found...)
	slices.SortStableFunc(out.Findings, func(a, b plan.Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return out, nil
}

// open opens the backup in a directory: that of its run, or the one with its manifest.
func open(dir string) (*backup.Backup, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open backup: %w", err)
	}
	if filepath.Base(dir) == backup.Dir {
		dir = filepath.Dir(dir)
	}
	if !backup.ValidID(filepath.Base(dir)) {
		return nil, &plan.Error{
			Op: "open backup", Err: fmt.Errorf("%s is not the folder of a backup: its name is not an ID such as backup-20261121070501-1a2b3c4d", dir), Exit: plan.ExitUsage,
			Remedy: "list backups with `constellation backup list`",
		}
	}
	b, err := backup.Open(filepath.Dir(dir), filepath.Base(dir), backup.Keys{})
	if err != nil {
		return nil, fmt.Errorf("open backup: %w", err)
	}
	if err := b.Locked(); err != nil {
		b.Close()
		return nil, &plan.Error{Op: "open backup", Err: err, Exit: plan.ExitUsage, Remedy: "decrypt it first: `constellation backup decrypt`"}
	}
	return b, nil
}

func snapshotOf(ctx context.Context, b *backup.Backup, hop manifests.Request, into *preflight.Objects) (counts, error) {
	root, err := os.OpenRoot(b.Path())
	if err != nil {
		return counts{}, err
	}
	defer root.Close()
	f, err := root.Open(backup.SnapshotFile)
	if err != nil {
		return counts{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return counts{}, err
	}
	return readSnapshot(ctx, f, info.Size(), hop, into)
}

func (c counts) findings() (out []plan.Finding) {
	if c.encrypted > 0 {
		out = append(out, plan.Finding{
			ID: "etcd-snapshot", Severity: plan.NotChecked, Source: "files", Title: fmt.Sprintf("not checked: %d objects that are encrypted at rest", c.encrypted), Objects: []string{"file/" + backup.SnapshotFile},
			Detail: "the key is in the encryption configuration of the API server", Remedy: "run `constellation check --kubeconfig FILE` on the cluster",
		})
	}
	if c.unreadable > 0 {
		out = append(out, plan.Finding{
			ID: "etcd-snapshot", Severity: plan.Warn, Source: "files", Title: fmt.Sprintf("%d objects of the etcd snapshot cannot be decoded", c.unreadable), Objects: []string{"file/" + backup.SnapshotFile},
			Detail: "an API server could not read them either, unless it is newer than this program", Remedy: "list each type with kubectl to see whether the API server reads it",
		})
	}
	return out
}

// listed adds the definitions of kinds and the records of Helm.
func listed(b *backup.Backup, hop manifests.Request, into *preflight.Objects) (n int, releases []plan.Finding, err error) {
	for _, t := range b.Manifest().Types {
		kinds := t.Group == "apiextensions.k8s.io" && t.Resource == "customresourcedefinitions"
		secrets := t.Group == "" && t.Resource == "secrets"
		n += int(t.Objects)
		if !kinds && !secrets {
			continue
		}
		for o, err := range b.Objects(t) {
			if err != nil {
				return n, releases, err
			}
			if kinds {
				if err := into.AddJSON(o.JSON); err != nil {
					return n, releases, err
				}
				continue
			}
			s, err := secretOf(o.JSON)
			if err != nil {
				return n, releases, err
			}
			releases = append(releases, releaseFindings(s, hop)...)
			into.Add(s, schema.GroupVersionKind{})
		}
	}
	return n, releases, nil
}

// secretOf decodes a Secret. Errors have no content of it.
func secretOf(text []byte) (*corev1.Secret, error) {
	s := &corev1.Secret{}
	if err := json.Unmarshal(text, s); err != nil {
		var syntax base64.CorruptInputError
		if errors.As(err, &syntax) {
			return nil, errors.New("decode Secret: its data is not base64")
		}
		return nil, errors.New("decode Secret: it is not JSON of a Secret")
	}
	return s, nil
}

func rank(s plan.Severity) int {
	return slices.Index([]plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}, s)
}
