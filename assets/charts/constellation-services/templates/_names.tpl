{{- define "services.labels" -}}
app.kubernetes.io/name: joinservice
app.kubernetes.io/part-of: constellation
app.kubernetes.io/version: {{ .Values.release | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
