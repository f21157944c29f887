package kube

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"constellation/engine/backup"
)

func (h hand) dump(w *backup.Writer, secrets bool) error {
	uid, err := h.c.ClusterUID(h.t.Context())
	if err != nil {
		return err
	}
	w.From(backup.Cluster{UID: uid, Server: "v1.35.4"})
	type what struct {
		t     backup.Type
		name  string
		path  string
		query url.Values
	}
	all := []what{{t: backup.Type{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions", Kind: "CustomResourceDefinition", Status: true}, name: backup.CRDs}}
	for b, err := range h.w.list(h.t.Context(), kindsPath, nil) {
		if err != nil {
			return err
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := json.Unmarshal(b, &crd); err != nil {
			return err
		}
		for _, v := range crd.Spec.Versions {
			if v.Storage {
				all = append(all, what{t: backup.Type{
					Group: crd.Spec.Group, Version: v.Name, Resource: crd.Spec.Names.Plural, Kind: crd.Spec.Names.Kind,
					Namespaced: crd.Spec.Scope == "Namespaced", Status: v.Subresources != nil && v.Subresources.Status != nil,
				}})
			}
		}
	}
	all = append(all,
		what{t: backup.Type{Version: "v1", Resource: "configmaps", Kind: "ConfigMap", Namespaced: true}, name: "kube-system/configmaps", path: "/api/v1/namespaces/kube-system/configmaps"},
		what{t: backup.Type{Version: "v1", Resource: "secrets", Kind: "Secret", Namespaced: true}, name: backup.Releases, query: url.Values{"fieldSelector": {"type=helm.sh/release.v1"}}},
	)
	if secrets {
		all = append(all, what{t: backup.Type{Version: "v1", Resource: "secrets", Kind: "Secret", Namespaced: true}, query: url.Values{"fieldSelector": {"type!=helm.sh/release.v1"}}})
	}
	for _, t := range all {
		tw, err := w.Type(t.t, t.name)
		if err != nil {
			return err
		}
		if t.path == "" {
			t.path = pathOf(t.t, "")
		}
		page, err := h.w.do(h.t.Context(), http.MethodGet, t.path, t.query, "application/json", nil)
		if err != nil {
			return err
		}
		s := backup.NewScanner(bytes.NewReader(page))
		for s.Next() {
			if err := tw.Add(s.Item()); err != nil {
				return err
			}
		}
		if s.Err() != nil {
			return s.Err()
		}
		if err := tw.Close("1"); err != nil {
			return err
		}
	}
	_, err = w.Commit(backup.Manifest{Secrets: secrets})
	return err
}
