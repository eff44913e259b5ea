#!/bin/sh
# nginx (apt-get install nginx-light) as a plain proxy to one engine outside of pairs: one leg, no choice, no change.
work=$BENCH_FOLDER
cat > "$work/nginx.conf" <<END
worker_processes 2;
daemon off;
pid $work/pid;
error_log stderr error;
worker_rlimit_nofile 16384;
events { worker_connections 8192; }
http {
    access_log off;
    keepalive_requests 1000000000;
    client_body_buffer_size 1m;
    client_max_body_size 64m;
    client_body_temp_path $work/body;
    proxy_temp_path $work/proxy;
    fastcgi_temp_path $work/fastcgi;
    uwsgi_temp_path $work/uwsgi;
    scgi_temp_path $work/scgi;
    upstream engine {
        server ${BENCH_REGULAR#http://};
        keepalive 4096;
        keepalive_requests 1000000000;
    }
    server {
        listen 127.0.0.1:$BENCH_PORT backlog=4096;
        location / {
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }
    }
}
END
exec nginx -c "$work/nginx.conf"
