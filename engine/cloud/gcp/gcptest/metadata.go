package gcptest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"
)

// Metadata returns the metadata server of a computer that is no machine of the cloud, and has an account. Credentials of
// Google's libraries come from it.
func (c *Cloud) Metadata() http.Handler { return metadataServer{c, nil} }

// MetadataOf returns the metadata server of the machine that has a name now. Without a service account, the
// machine gets no token. Without a machine, all answers are 404.
func (c *Cloud) MetadataOf(name string) http.Handler {
	return metadataServer{c, func() *compute.Instance {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, g := range c.groups {
			for _, m := range g.managed {
				if m.name == name && m.vm != nil {
					vm := *m.vm
					return &vm
				}
			}
		}
		return &compute.Instance{}
	}}
}

// metadataServer serves the tree of https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys.
type metadataServer struct {
	c    *Cloud
	self func() *compute.Instance // nil: no machine
}

// ServeHTTP implements http.Handler.
func (s metadataServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Metadata-Flavor") != "Google" {
		http.Error(w, "Missing required header: Metadata-Flavor", http.StatusForbidden)
		return
	}
	if r.Header.Get("X-Forwarded-For") != "" {
		http.Error(w, "Forbidden: X-Forwarded-For", http.StatusForbidden)
		return
	}
	w.Header().Set("Metadata-Flavor", "Google")
	if r.URL.Path == "/" {
		fmt.Fprint(w, "computeMetadata/\n")
		return
	}
	where, ok := strings.CutPrefix(r.URL.Path, "/computeMetadata/v1/")
	tree, accounts := s.tree()
	if tree == nil || !ok {
		http.NotFound(w, r)
		return
	}
	if account, is := strings.CutPrefix(where, "instance/service-accounts/"); is && path.Base(account) == "token" {
		scopes, ok := accounts[path.Dir(account)]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if wanted := r.URL.Query().Get("scopes"); wanted != "" {
			scopes = slices.DeleteFunc(strings.Split(wanted, ","), func(x string) bool { return !slices.Contains(scopes, x) })
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": s.c.NewToken("", time.Hour, scopes...), "expires_in": 3600, "token_type": "Bearer"}) // the client may be gone
		return
	}
	recursive := r.URL.Query().Get("recursive") == "true"
	body, ok := s.changed(r.Context(), r.URL.Query(), func() ([]byte, bool) {
		tree, _ := s.tree()
		return render(tree, where, recursive)
	})
	if !ok {
		http.NotFound(w, r)
		return
	}
	if bytes.HasPrefix(body, []byte("{")) || bytes.HasPrefix(body, []byte("[")) {
		w.Header().Set("Content-Type", "application/json")
	}
	w.Header().Set("ETag", etag(body))
	_, _ = w.Write(body) // the client may be gone
}

// etag returns the version of an entry.
func etag(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:8])
}

// changed returns an entry as it is, or when it has changed if the query demands that. It then answers after timeout_sec, too,
// or when the client is gone.
func (s metadataServer) changed(ctx context.Context, query url.Values, read func() ([]byte, bool)) (body []byte, ok bool) {
	if query.Get("wait_for_change") != "true" {
		return read()
	}
	if n, err := strconv.Atoi(query.Get("timeout_sec")); err == nil && n > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(n)*time.Second)
		defer cancel()
	}
	last := query.Get("last_etag")
	for {
		s.c.mu.Lock()
		change := s.c.announced
		s.c.mu.Unlock()
		body, ok = read()
		if !ok {
			return nil, false
		}
		if last == "" { // the next change from now on
			last = etag(body)
		}
		if etag(body) != last {
			return body, true
		}
		select {
		case <-ctx.Done():
			return body, true
		case <-change:
		}
	}
}

// render returns an entry of a tree; false: there is none.
func render(tree map[string]any, where string, recursive bool) ([]byte, bool) {
	if tree == nil {
		return nil, false
	}
	at := any(tree)
	for segment := range strings.SplitSeq(strings.Trim(where, "/"), "/") {
		if segment != "" {
			at = child(at, segment)
		}
	}
	switch x := at.(type) {
	case nil:
		return nil, false
	case string:
		return []byte(x), true
	case json.Number:
		return []byte(x), true
	default:
		if recursive {
			b, err := json.Marshal(x)
			return b, err == nil
		}
		return []byte(listing(x)), true
	}
}

// child returns an entry of a directory; nil if there is none. Names have hyphens in paths, and capitals in JSON.
func child(dir any, segment string) any {
	switch x := dir.(type) {
	case map[string]any:
		if v, ok := x[segment]; ok {
			return v
		}
		words := strings.Split(segment, "-")
		for n := 1; n < len(words); n++ {
			if words[n] != "" {
				words[n] = strings.ToUpper(words[n][:1]) + words[n][1:]
			}
		}
		return x[strings.Join(words, "")]
	case []any:
		if n, err := strconv.Atoi(segment); err == nil && n >= 0 && n < len(x) {
			return x[n]
		}
	}
	return nil
}

// listing returns the entries of a directory, one in a line.
func listing(dir any) string {
	var out strings.Builder
	entry := func(name string, v any) {
		switch v.(type) {
		case map[string]any, []any:
			name += "/"
		}
		out.WriteString(name + "\n")
	}
	switch x := dir.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(x)) {
			entry(name, x[name])
		}
	case []any:
		for n, v := range x {
			entry(strconv.Itoa(n), v)
		}
	}
	return out.String()
}

// number is the number of the project of every cloud.
const number = "123456789012"

// tree returns the metadata, and the scopes of the accounts by name. It is nil if the machine is gone.
func (s metadataServer) tree() (tree map[string]any, accounts map[string][]string) {
	project := map[string]any{"projectId": s.c.o.Project, "numericProjectId": json.Number(number), "attributes": map[string]any{}}
	tree = map[string]any{"project": project, "universe": map[string]any{"universeDomain": "googleapis.com"}}
	if s.self == nil {
		return tree, map[string][]string{"default": {scope}}
	}
	vm := s.self()
	if vm.Name == "" {
		return nil, nil
	}
	attributes := map[string]any{}
	image := ""
	for _, item := range vm.Metadata.Items {
		attributes[item.Key] = *item.Value
		if item.Key == "instance-template" {
			image = s.c.imageOf(path.Base(*item.Value))
		}
	}
	var nics []any
	for _, n := range vm.NetworkInterfaces {
		aliases := []any{}
		for _, a := range n.AliasIpRanges {
			aliases = append(aliases, a.IpCidrRange)
		}
		nics = append(nics, map[string]any{"ip": n.NetworkIP, "ipAliases": aliases})
	}
	accounts = map[string][]string{}
	listed := map[string]any{}
	for _, a := range vm.ServiceAccounts {
		for _, name := range []string{"default", a.Email} {
			accounts[name] = a.Scopes
			listed[name] = map[string]any{"email": a.Email, "aliases": []any{"default"}, "scopes": a.Scopes}
		}
	}
	zone := path.Base(vm.Zone)
	preempted, maintenance := s.c.announcedTo(vm.Id)
	tree["instance"] = map[string]any{
		"preempted": preempted, "maintenanceEvent": maintenance,
		"id": json.Number(strconv.FormatUint(vm.Id, 10)), "name": vm.Name, "zone": "projects/" + number + "/zones/" + zone, "image": image,
		"hostname": vm.Name + "." + zone + ".c." + s.c.o.Project + ".internal", "attributes": attributes, "networkInterfaces": nics, "serviceAccounts": listed,
	}
	return tree, accounts
}

// imageOf returns the image of a template.
func (c *Cloud) imageOf(template string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.templates[template]; t != nil {
		return t.Properties.Disks[0].InitializeParams.SourceImage
	}
	return ""
}
