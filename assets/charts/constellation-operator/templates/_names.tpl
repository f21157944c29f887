{{- define "operator.labels" -}}
app.kubernetes.io/name: constellation-operator
app.kubernetes.io/part-of: constellation
app.kubernetes.io/version: {{ .Values.release | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "relay.labels" -}}
app.kubernetes.io/name: constellation-relay
app.kubernetes.io/part-of: constellation
app.kubernetes.io/version: {{ .Values.release | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "plans.labels" -}}
app.kubernetes.io/name: constellation-plans
app.kubernetes.io/part-of: constellation
app.kubernetes.io/version: {{ .Values.release | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "operator.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
