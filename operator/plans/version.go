package plans

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	kubectlhash "k8s.io/kubectl/pkg/util/hash"

	"constellation/operator/api/upgradev1"
)

// imageTag converts a version to a valid image tag.
func imageTag(version string) string { return strings.ReplaceAll(version, "+", "-") }

// latestHash returns the label value of finished nodes. It must be bit-identical to the value of
// system-upgrade-controller, so that nodes with that controller's label count as finished.
// docs/plans.md lists the input. secret returns the hash of a Secret's content.
func latestHash(p *upgradev1.Plan, version string, secret func(name string) (string, error)) (string, error) {
	h := sha256.New224()
	put := func(s string) { h.Write([]byte(s)) }
	put(version)
	put(p.Spec.ServiceAccountName)
	if paths, ok := p.Annotations[upgradev1.AnnotationDigest]; ok {
		fields, err := asFields(p)
		if err != nil {
			return "", fmt.Errorf("digest the plan: %w", err)
		}
		for path := range strings.SplitSeq(paths, ",") {
			put(digest(fields, strings.Split(path, ".")))
		}
	}
	for _, s := range p.Spec.Secrets {
		if s.IgnoreUpdates {
			continue
		}
		sum, err := secret(s.Name)
		if err != nil {
			return "", err
		}
		put(sum)
	}
	// A field of this controller alone: without it the hash stays compatible.
	if r := p.Spec.Constellation; r != nil && r.Rerun != "" {
		put("\x00" + r.Rerun)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// asFields returns the Plan as decoded JSON, with numbers in their literal form.
func asFields(p *upgradev1.Plan) (map[string]any, error) {
	p = p.DeepCopy()
	if d := p.Spec.PostCompleteDelay; d != nil {
		// In the other controller it is a duration and formatted as such.
		if v, err := time.ParseDuration(string(*d)); err == nil {
			*d = upgradev1.Duration(v.String())
		}
	}
	b, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	var out map[string]any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	return out, d.Decode(&out)
}

// digest returns the part of a field that is hashed: of a list only the first element, without its
// nested values.
func digest(from map[string]any, path []string) string {
	var at any = from
	for _, key := range path {
		m, ok := at.(map[string]any)
		if !ok {
			return ""
		}
		at = m[key]
	}
	if l, ok := at.([]any); ok {
		if len(l) == 0 {
			return ""
		}
		at = l[0]
	}
	if at == nil {
		return ""
	}
	return strings.TrimSpace(fmt.Sprint(at))
}

// secretHash returns the hash of a Secret's content, name and type, as kubectl computes it.
func secretHash(s *corev1.Secret) (string, error) { return kubectlhash.SecretHash(s) }

// safeName joins parts with dashes to a name of at most 63 characters. A longer name is truncated
// and ends with a part of its hash.
func safeName(parts ...string) string {
	s := strings.Join(parts, "-")
	if len(s) <= validation.DNS1123LabelMaxLength {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	keep := 57
	if c := s[keep-1]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
		keep--
	}
	return s[:keep] + "-" + hex.EncodeToString(sum[:4])[:validation.DNS1123LabelMaxLength-1-keep]
}

// jobName returns the name of the Job of a Plan on a node for a hash.
func jobName(plan, node, hash string) string {
	short, _, _ := strings.Cut(node, ".")
	return safeName("apply", plan, "on", short, "with", hash)
}

// labelValue returns s if it is a valid label value. Otherwise it returns a truncated s with a part of
// its hash.
func labelValue(s string) string {
	if len(validation.IsValidLabelValue(s)) == 0 {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_', r == '.':
			return r
		}
		return '-'
	}, s)
	clean = strings.Trim(clean[:min(len(clean), 52)], "-_.")
	return strings.TrimPrefix(clean+"-"+hex.EncodeToString(sum[:])[:10], "-")
}

// order returns the sort key of a node in a Plan: pseudorandom, and constant for one hash.
func order(nodeUID, planUID, hash string) string {
	sum := sha256.Sum256([]byte(nodeUID + planUID + hash))
	return string(sum[:])
}
