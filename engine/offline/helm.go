package offline

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"

	"constellation/engine/kube/preflight"
	"constellation/engine/manifests"
	"constellation/engine/plan"
)

// maxRelease bounds the decompressed size of a release of Helm.
const maxRelease = 64 << 20

// releaseFindings are removed APIs and deprecated fields in the manifests of a deployed release
// of Helm. Its next upgrade or rollback would send them again.
func releaseFindings(s *corev1.Secret, r manifests.Request) []plan.Finding {
	if s.Type != "helm.sh/release.v1" || s.Labels["status"] != "deployed" {
		return nil
	}
	text, err := releaseManifest(s.Data["release"])
	if err != nil {
		return nil // the check helm-charts reports it
	}
	name := preflight.Printable(s.Namespace + "/" + s.Labels["name"])
	var out []plan.Finding
	for _, f := range manifests.Text("release.yaml", text, r).Findings {
		if f.ID != "removed-apis-written" && f.ID != "deprecated-fields" {
			continue
		}
		f.Title = fmt.Sprintf("Helm release %s: %s", name, f.Title)
		f.Owner = fmt.Sprintf("namespace %s, Helm release %s", preflight.Printable(s.Namespace), preflight.Printable(s.Labels["name"]))
		f.Objects = append(f.Objects, preflight.Object("HelmRelease", s.Namespace, s.Labels["name"]))
		f.Locations = nil
		if f.ID == "removed-apis-written" {
			f.Severity = plan.Warn // the objects are served in another version
			f.Detail = "the next upgrade or rollback of the release fails while its record names the version"
			f.Remedy = "upgrade the release before the hop to a chart without it; the plugin helm-mapkubeapis corrects a record afterwards"
		}
		out = append(out, f)
	}
	return out
}

// releaseManifest decodes a release in Helm's format, base64 of JSON, optionally gzipped, and
// returns its manifests.
func releaseManifest(data []byte) ([]byte, error) {
	packed, err := base64.StdEncoding.DecodeString(string(data))
	if err != nil {
		return nil, fmt.Errorf("read release: %w", err)
	}
	var in io.Reader = bytes.NewReader(packed)
	if bytes.HasPrefix(packed, []byte{0x1f, 0x8b}) {
		if in, err = gzip.NewReader(in); err != nil {
			return nil, fmt.Errorf("read release: %w", err)
		}
	}
	var release struct {
		Manifest string `json:"manifest"`
	}
	if err := json.NewDecoder(io.LimitReader(in, maxRelease)).Decode(&release); err != nil {
		return nil, fmt.Errorf("read release: %w", err)
	}
	return []byte(release.Manifest), nil
}
