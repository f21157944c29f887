{{- define "policies.labels" -}}
app.kubernetes.io/name: constellation-policies
app.kubernetes.io/part-of: constellation
app.kubernetes.io/version: {{ .Values.release | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- /* The user name of a ServiceAccount in our own namespace. */}}
{{- define "policies.operator" -}}system:serviceaccount:{{ .Release.Namespace }}:constellation-operator{{- end }}
{{- define "policies.joinservice" -}}system:serviceaccount:{{ .Release.Namespace }}:joinservice{{- end }}
{{- define "policies.plans" -}}system:serviceaccount:system-upgrade:constellation-plans{{- end }}
{{- define "policies.jobs" -}}system:serviceaccount:system-upgrade:system-upgrade{{- end }}
{{- /*
Whoever may take a snapshot of etcd has every Secret of the cluster, so there is nothing
left to keep from them. The authorizer is asked for that right to tell administrators from
holders of the roles edit and admin in one namespace.

An account of our own is no administrator, whatever it may do: holders of these roles may
impersonate it, and one of them exists to take snapshots.
*/}}
{{- define "policies.administrator" -}}
!request.userInfo.username.startsWith('system:serviceaccount:{{ .Release.Namespace }}:') && !request.userInfo.username.startsWith('system:serviceaccount:system-upgrade:') &&
        authorizer.group('update.edgeless.systems').resource('etcdsnapshots').check('create').allowed()
{{- end }}
{{- /* An update of a Secret or ConfigMap that changes its data and annotations at most. */}}
{{- define "policies.content" -}}
request.operation == 'UPDATE' && object.?type == oldObject.?type && object.?binaryData == oldObject.?binaryData && object.?immutable == oldObject.?immutable &&
        object.metadata.?labels == oldObject.metadata.?labels &&
        object.metadata.?finalizers == oldObject.metadata.?finalizers && object.metadata.?ownerReferences == oldObject.metadata.?ownerReferences
{{- end }}
{{- /*
Everything but an update without a change. The controller manager makes such updates to have Secrets encrypted with another
key (StorageVersionMigration).
*/}}
{{- define "policies.changed" -}}
!({{ include "policies.content" . }} && object.?data == oldObject.?data && object.metadata.?annotations == oldObject.metadata.?annotations)
{{- end }}
{{- /* A policy's binding: it denies, everywhere. */}}
{{- define "policies.binding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .name }}
  labels: {{- include "policies.labels" .root | nindent 4 }}
spec:
  policyName: {{ .name }}
  validationActions: [Deny]
  {{- with .namespaces }}
  matchResources:
    namespaceSelector:
      matchExpressions:
        - {key: kubernetes.io/metadata.name, operator: In, values: {{ . }}}
  {{- end }}
{{- end }}
